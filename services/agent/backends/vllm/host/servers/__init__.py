"""Engines in servers that others run, reached in tokens over HTTP."""
