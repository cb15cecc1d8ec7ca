"""The models that an agent may serve."""

import asyncio
from collections.abc import Collection, Iterable
from pathlib import Path

from services.agent.backends.base import EngineBackend
from services.agent.lso.situation import ModelSizes
from services.agent.settings import Settings
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.digest import model_digest
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer


class ServableModels:
    """
    Registry entries, tokenizers, digests and sizes of the models that this instance may serve.

    Its mappings are live: they contain models that are added later.
    """

    def __init__(self, entries: Iterable[ModelEntry]) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.tokenizers = {
            name: Tokenizer.load(Path(entry.path)) for name, entry in self.entries.items()
        }
        self.digests = {name: model_digest(entry) for name, entry in self.entries.items()}
        """Base model -> digest of the model's files and settings."""
        self.sizes = ModelSizes.of(self.entries.values())

    @property
    def names(self) -> Collection[ModelName]:
        """Base models; a live view."""
        return self.entries.keys()

    async def add(self, entry: ModelEntry, engine: EngineBackend) -> None:
        """
        Add a model to these and to *engine*.

        Raises:
            SettingsError: The model has no tokenizer.
        """
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(entry.path))
        engine.add(entry)
        self.tokenizers[entry.name] = tokenizer
        self.digests[entry.name] = model_digest(entry)
        self.sizes.add(entry)
        self.entries[entry.name] = entry


def servable_entries(settings: Settings, registry: ModelRegistry) -> tuple[ModelEntry, ...]:
    """
    Entries of the models that the settings name; of all models if they name none.

    Raises:
        SettingsError: A named model is not in the registry.
    """
    names = settings.models or registry.bases
    unknown = [
        name
        for name in (*names, *settings.warm_models, settings.initial_model)
        if name and name not in registry.bases
    ]
    if unknown:
        known = ", ".join(registry.bases)
        raise SettingsError(f"models {unknown} are not in the registry; must be among: {known}")
    return tuple(registry.entry(ModelName(name)) for name in names)
