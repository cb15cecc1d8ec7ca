"""Checks and measures the engine on this machine's device, and writes one report."""
