"""Predictions compared with outcomes: corrections, coverage and error statistics."""
