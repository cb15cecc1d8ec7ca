"""Quantiles of prefill times from trees (QUARTZ §3.2)."""
