"""Policies of stored objects: how much a tenant may store, and what is deleted when."""
