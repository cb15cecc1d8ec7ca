"""The main job in one command: a mesh, a mixed workload, a report."""
