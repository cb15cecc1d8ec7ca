"""Trace simulator: scheduling policies with a model of vLLM's scheduler and memory allocator."""
