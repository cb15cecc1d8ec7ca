"""Predictions: latency, output lengths, completion times."""
