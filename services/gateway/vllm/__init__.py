"""
vLLM's own API application, whose engine core is the mesh.

Modules, from the client to the broker: `door` (ASGI), `application` (vLLM's application of one
model), `engine_client` (vLLM's engine without an engine process), `core_client` (publishes requests
and receives their answers).
"""
