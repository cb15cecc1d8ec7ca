"""`headway demo`: a mixed load against a running mesh, and what became of it."""
