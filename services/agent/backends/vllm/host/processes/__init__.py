"""Processes of engines: their start, their children and their end."""
