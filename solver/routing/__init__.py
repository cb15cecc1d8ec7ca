"""Routing and admission of requests, and shares of tenants (QUARTZ)."""
