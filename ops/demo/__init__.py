"""Demo with one command: a mesh serves a mixed workload, and a report compares two arms."""
