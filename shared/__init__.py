"""Contracts, broker clients and runtime code that all Headway services share; no policies."""
