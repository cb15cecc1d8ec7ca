"""Rows of work that goes on without a connection."""
