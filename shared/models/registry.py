"""Model registry: maps wire names to models on disk."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError, SettingsError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import ModelRef


class _RegistryFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[ModelEntry, ...]


class ModelRegistry:
    """
    Resolves model names of requests to (base, adapter, revision).

    Args:
        entries: Base models; names, aliases and adapter names must not clash.

    Raises:
        SettingsError: Two models have the same name.
    """

    def __init__(self, entries: Iterable[ModelEntry]) -> None:
        self._entries: dict[ModelName, ModelEntry] = {}
        self._refs: dict[str, ModelRef] = {}
        for entry in entries:
            self._entries[entry.name] = entry
            for name in (entry.name, *entry.aliases):
                self._add(ModelRef(name=name, base=entry.name, revision=entry.revision))
            for name in entry.adapters:
                self._add(
                    ModelRef(name=name, base=entry.name, adapter=name, revision=entry.revision)
                )

    def _add(self, ref: ModelRef) -> None:
        if ref.name in self._refs:
            raise SettingsError(f"two models in the registry have the name {ref.name!r}")
        self._refs[ref.name] = ref

    @classmethod
    def load(cls, path: Path) -> "ModelRegistry":
        """
        Load the registry from a JSON file `{"models": [...]}`; model paths become absolute.

        Raises:
            SettingsError: The file is missing or not valid JSON, has an unknown field, or contains
                a name twice.
        """
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_RegistryFile)
        except OSError as error:
            raise SettingsError(f"cannot read the model registry {path}: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"model registry {path}: {error}") from error
        root = path.resolve().parent
        return cls(
            msgspec.structs.replace(entry, path=str(root / entry.path)) for entry in file.models
        )

    def resolve(self, name: str) -> ModelRef:
        """
        Resolve the model name of a request.

        Raises:
            ContractError: The name is unknown; the message lists the known names.
        """
        ref = self._refs.get(name)
        if ref is None:
            known = ", ".join(sorted(self._refs)) or "none"
            raise ContractError(
                f"model {name[:80]!r} does not exist; known models: {known}",
                code="model_not_found",
                param="model",
                status=404,
            )
        return ref

    def entry(self, base: ModelName) -> ModelEntry:
        """Return the entry of a base model, which must exist."""
        return self._entries[base]

    @property
    def names(self) -> tuple[str, ...]:
        """All model names that requests can use."""
        return tuple(self._refs)

    @property
    def bases(self) -> tuple[ModelName, ...]:
        """All base models."""
        return tuple(self._entries)


def write_registry(path: Path, entries: Iterable[ModelEntry]) -> None:
    """Write *entries* as a registry file that `ModelRegistry.load` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        msgspec.json.format(msgspec.json.encode(_RegistryFile(models=tuple(entries))), indent=2)
    )
