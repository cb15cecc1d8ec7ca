"""The console: a read-only view of the mesh for operators, in a browser."""
