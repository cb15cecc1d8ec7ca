"""OpenAI's Files API over the store."""
