"""
Encoding of vLLM's engine-core messages in messages of the mesh.

The gateway's vLLM front and the agent's engine host import this package, which imports vLLM.
"""
