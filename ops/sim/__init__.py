"""Trace simulator: the scheduling policies over a model of vLLM's scheduler and allocator."""
