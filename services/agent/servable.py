"""The models that an agent may serve."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec

from services.agent.backends.base import EngineBackend
from services.agent.devices.own import has_devices
from services.agent.settings import Settings
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import ModelRef
from shared.models.files.sizes import kv_bytes_per_token, weight_bytes
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from solver.instance.events import ModelFacts


class ServableModels:
    """
    Registry entries and tokenizers of the models that this instance may serve.

    Its mappings are live: they contain models that are added later.
    """

    def __init__(self, entries: Iterable[ModelEntry]) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.tokenizers = {
            name: Tokenizer.load(Path(entry.path))
            for name, entry in self.entries.items()
            if not entry.takes_bodies
        }
        """Base model -> its tokenizer; models that take bodies have none."""
        self.releasing: set[ModelName] = set()
        """Models that the engine is releasing now; only the shell writes the field."""

    def facts(self) -> dict[ModelName, ModelFacts]:
        """Sizes of the models."""
        return {name: self._facts(entry) for name, entry in self.entries.items()}

    async def add(self, entry: ModelEntry, engine: EngineBackend) -> ModelFacts:
        """
        Add a model to these and to *engine*, and return its facts.

        Raises:
            SettingsError: The model has no tokenizer, or the engine still has a model of the name
                that was removed.
        """
        self._require_free(entry)
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(entry.path))
        self._require_free(entry)  # a release may have begun meanwhile
        engine.add(entry)
        self.tokenizers[entry.name] = tokenizer
        self.entries[entry.name] = entry
        return self._facts(entry)

    def replace(self, entry: ModelEntry, engine: EngineBackend) -> None:
        """
        Serve other adapters of a model, and those that were removed as long as requests for them
        are queued.

        Raises:
            EngineError: The model's engine has no room for adapters.
        """
        engine.replace(entry)
        adapters = self.entries[entry.name].adapters | entry.adapters
        self.entries[entry.name] = msgspec.structs.replace(entry, adapters=adapters)

    def has_adapter(self, model: ModelRef) -> bool:
        """Return whether the adapter of a request is known; True if it has none."""
        return model.adapter is None or model.adapter in self.entries[model.base].adapters

    def remove(self, model: ModelName) -> None:
        """Remove a model that the engine has released."""
        for mapping in (self.entries, self.tokenizers):
            mapping.pop(model, None)

    def _require_free(self, entry: ModelEntry) -> None:
        held = self.entries.get(entry.name)
        if entry.name in self.releasing or (held is not None and held != entry):
            raise SettingsError("this instance still serves the former model of the name")

    def _facts(self, entry: ModelEntry) -> ModelFacts:
        return ModelFacts(
            model=entry.name,
            weight_bytes=weight_bytes(entry),
            kv_bytes_per_token=kv_bytes_per_token(entry),
        )


def servable_entries(settings: Settings, registry: ModelRegistry) -> tuple[ModelEntry, ...]:
    """
    Entries of the models that the settings name; if they name none, of all models for which the
    agent has enough devices.

    Raises:
        SettingsError: A named model is not in the registry.
    """
    names = settings.models or [
        base
        for base in registry.bases
        if not (entry := registry.entry(base)).takes_bodies and has_devices(settings, entry)
    ]
    unknown = [
        name
        for name in (*names, *settings.warm_models, settings.initial_model)
        if name and name not in registry.bases
    ]
    if unknown:
        known = ", ".join(registry.bases)
        raise SettingsError(f"models {unknown} are not in the registry; must be among: {known}")
    return tuple(registry.entry(ModelName(name)) for name in names)
