"""Code that runs inside vLLM's engine core process: schedulers, their queue and online learning."""
