"""Part of the vLLM backend that runs in the agent's process and never imports vLLM."""
