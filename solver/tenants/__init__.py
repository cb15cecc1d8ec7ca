"""Policies of tenants: what a request is granted, and how groupers share limits."""
