"""Messages, shared memory and settings of several processes of the backend; imports no vLLM."""
