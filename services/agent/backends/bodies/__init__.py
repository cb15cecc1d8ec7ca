"""Application of simulated engines: answers the bodies of the four endpoints that generate text."""
