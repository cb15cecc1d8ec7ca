"""The model of a bench that the user gives."""

from pathlib import Path

import msgspec

from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.files.derive import derive_entry

LONGEST = 8192
"""Maximum length of a request in a bench, in tokens, if the model allows more."""


def given_model(directory: Path, name: ModelName) -> ModelEntry:
    """
    Entry of the model in *directory*, a folder as Hugging Face stores it.

    Raises:
        SettingsError: A file of the model is missing or invalid.
    """
    try:
        entry = derive_entry(directory, name=name, task="generate")
    except SettingsError as error:
        raise SettingsError(
            f"--model {directory}: {error}; give the folder of a model with config.json, "
            "tokenizer.json and weights"
        ) from error
    return msgspec.structs.replace(entry, max_model_len=min(entry.max_model_len, LONGEST))
