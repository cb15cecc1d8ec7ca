"""Measures a live engine on a grid of (chunk, context, batch), and fits its latency model."""
