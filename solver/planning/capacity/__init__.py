"""Advice on the number of instances that the present load needs."""
