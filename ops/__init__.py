"""Outermost: demo, benches, simulation, deployment files. Not in the wheel."""
