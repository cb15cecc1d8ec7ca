"""The part of the vLLM backend that runs in the agent's process. It never imports vLLM."""
