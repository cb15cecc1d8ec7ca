"""OpenAI's Files API over the store, for both fronts."""
