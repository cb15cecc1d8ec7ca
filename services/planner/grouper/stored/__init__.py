"""Requests whose ids mean something: claims of ids, and replies on their way to the store."""
