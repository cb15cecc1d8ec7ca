"""An engine without a model: vLLM's scheduling and memory, simulated time, hashed tokens."""
