"""Outermost layer: demo, benches, simulation, deployment files. Not in the wheel."""
