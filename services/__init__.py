"""The four services of the mesh and the command that runs them together."""
