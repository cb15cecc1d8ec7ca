"""Demo in one command: a mesh, a mixed workload, a report."""
