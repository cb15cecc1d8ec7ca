"""Artefacts of a release: `make release`."""
