"""Baselines and reference programs with which benches and simulations compare Headway."""
