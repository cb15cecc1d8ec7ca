"""Rows of objects that gateways make for clients."""
