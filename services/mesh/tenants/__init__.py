"""Commands about tenants: API keys and usage."""
