"""Models on disk: the registry, tokenizers, and generated tiny models."""
