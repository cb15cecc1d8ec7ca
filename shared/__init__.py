"""Contracts, broker plumbing and runtime that every Headway service shares; no policy."""
