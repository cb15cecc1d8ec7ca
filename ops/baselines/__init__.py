"""Baselines and reference programs that benches and simulations compare Headway with."""
