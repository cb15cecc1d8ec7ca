"""The choice of LLM serving operations for an instance (QLM §5)."""
