"""An engine that simulates vLLM's scheduling, memory and times; its tokens are hashes."""
