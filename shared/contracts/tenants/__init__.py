"""Tenants: their policies and limits, their keys, and their usage."""
