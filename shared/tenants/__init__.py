"""Tenants: their policies, their API keys and their usage, read from files."""
