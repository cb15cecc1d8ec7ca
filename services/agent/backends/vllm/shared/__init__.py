"""Messages, shared memory and settings that several of these processes use. Imports no vLLM."""
