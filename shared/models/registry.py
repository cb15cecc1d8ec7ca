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
        SettingsError: Two models have the same name, or the fields of a model contradict its task.
    """

    def __init__(self, entries: Iterable[ModelEntry]) -> None:
        self._entries: dict[ModelName, ModelEntry] = {}
        self._refs: dict[str, ModelRef] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: ModelEntry) -> None:
        """
        Add a base model with its aliases and adapters.

        Raises:
            SettingsError: Another model has one of the names, or the model's fields contradict its
                task; nothing is added.
        """
        _check_task(entry)
        plain = ModelRef(name=entry.name, base=entry.name, revision=entry.revision)
        replace = msgspec.structs.replace
        refs = [plain, *(replace(plain, name=alias) for alias in entry.aliases)]
        refs += [replace(plain, name=name, adapter=name) for name in entry.adapters]
        names = [ref.name for ref in refs]
        for name in names:
            if name in self._refs or names.count(name) > 1:
                raise SettingsError(f"two models in the registry have the name {name!r}")
        self._refs |= {ref.name: ref for ref in refs}
        self._entries[entry.name] = entry

    @classmethod
    def load(cls, path: Path) -> "ModelRegistry":
        """
        Load the registry from a JSON file `{"models": [...]}`; model paths become absolute.

        Raises:
            SettingsError: The file is missing or not valid JSON, has an unknown field, contains a
                name twice, or has a model whose fields contradict its task.
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


def _check_task(entry: ModelEntry) -> None:
    """
    Check the fields of a model that depend on its task.

    Raises:
        SettingsError: A pooling model has a parser, or `engine_args` select the task.
    """
    for name in ("runner", "task"):
        if name in entry.engine_args:
            raise SettingsError(
                f"engine_args of model {entry.name!r} must not have {name!r}; set the model's task"
            )
    for name in ("tool_parser", "reasoning_parser"):
        if entry.pools and getattr(entry, name) is not None:
            raise SettingsError(
                f"model {entry.name!r} with the task {entry.task!r} generates no text, so it takes "
                f"no {name}"
            )


def write_registry(path: Path, entries: Iterable[ModelEntry]) -> None:
    """Write *entries* as a registry file that `ModelRegistry.load` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        msgspec.json.format(msgspec.json.encode(_RegistryFile(models=tuple(entries))), indent=2)
    )
