"""The engine host: imports vLLM, creates engines and executes the front's commands."""
