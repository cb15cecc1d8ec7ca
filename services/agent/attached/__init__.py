"""Instances for servers that others run."""
