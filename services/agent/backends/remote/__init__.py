"""Backend for servers that others run: vLLM's server, and other servers with OpenAI's API."""
