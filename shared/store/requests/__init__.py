"""Requests whose ids mean something: what was asked under an id, and what came back."""
