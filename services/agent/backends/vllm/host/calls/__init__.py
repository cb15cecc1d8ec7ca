"""Calls: requests that vLLM's application renders and answers in the engine host."""
