"""Plan generators as mathematical programs: for small problems, bounds, and comparison."""
