"""The policy of one engine: which requests each iteration computes (QoServe, ConServe)."""
