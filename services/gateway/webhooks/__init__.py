"""Webhooks: events about stored objects, delivered to URLs of tenants."""
