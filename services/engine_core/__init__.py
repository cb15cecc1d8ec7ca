"""
vLLM's API application over another engine core, and the encoding of that core's messages.

The gateway's vLLM front and the agent's engine host import this package, which imports vLLM;
`environment` is what their processes need before.
"""
