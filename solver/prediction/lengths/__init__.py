"""Lengths of prompts and answers."""
