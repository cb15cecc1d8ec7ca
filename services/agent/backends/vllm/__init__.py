"""vLLM as an engine backend: a front that never imports it, and a host process that does."""
