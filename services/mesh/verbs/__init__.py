"""Verbs of `headway`: functions whose typed parameters are the options."""
