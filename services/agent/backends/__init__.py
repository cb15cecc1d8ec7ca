"""LLM engines behind one protocol."""
