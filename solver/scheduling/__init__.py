"""What runs next on one instance. Imports neither OR-Tools nor numba: it runs in engine cores."""
