"""Time of a forward pass and of a request on one instance."""
