"""
vLLM's API application over another engine core, and the encoding of that core's messages.

The agent's engine host imports this package, which imports vLLM.
"""
