"""
vLLM's own API application, whose engine core is the mesh.

Modules, from the client to the broker: `door` (ASGI), vLLM's application of a model
(`services.engine_core.application`), `core_client` (publishes requests and receives their answers).
"""
