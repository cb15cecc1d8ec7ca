"""
Choice of the next iteration on one instance.

Imports neither OR-Tools nor numba, because it runs in engine cores.
"""
