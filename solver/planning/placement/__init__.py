"""Placement: which model begins on which devices of a machine, and what does not fit."""
