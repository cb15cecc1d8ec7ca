"""The engine host: imports vLLM, creates engines and carries out the front's commands."""
