"""Reads the files of models, without a deep-learning library."""
