"""Verbs of `headway-agent` that have their own modules."""
