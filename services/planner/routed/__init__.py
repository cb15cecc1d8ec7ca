"""Routed mode (QUARTZ): groupers place each request in the inbox of one instance."""
