"""Image processors of models."""

from pathlib import Path

from shared.contracts.models import ModelEntry

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a model's directory that configure its image processor."""


def has_processor(entry: ModelEntry) -> bool:
    """Return whether the model's directory configures an image processor."""
    return any((Path(entry.path) / name).is_file() for name in PROCESSOR_FILES)
