"""Models on disk: the registry, tokenizers, and tiny ones made on the spot."""
