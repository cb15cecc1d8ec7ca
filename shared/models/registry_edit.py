"""Changes of a registry file, safe against concurrent readers and writers."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry, TrafficSplit
from shared.models.registry import (
    ModelRegistry,
    RegistryFile,
    decode_registry,
    encode_registry,
    read_registry,
)


@dataclass(slots=True)
class RegistryEdit:
    """A registry file that is being changed; directories are as written in the file."""

    path: Path
    models: dict[ModelName, ModelEntry] = field(default_factory=dict)
    splits: dict[str, TrafficSplit] = field(default_factory=dict)

    def add(self, entry: ModelEntry) -> None:
        """
        Add a model, or the adapters of a known model.

        Raises:
            SettingsError: A model has the name.
        """
        if entry.name in self.models:
            raise SettingsError(
                f"model {entry.name!r} exists in {self.path}: give another name with MODEL=NAME, "
                "or remove it first"
            )
        self.models[entry.name] = self._with_written_path(entry)

    def add_adapter(self, base: str, name: str, directory: Path) -> None:
        """
        Add a LoRA adapter to the model *base*.

        Raises:
            SettingsError: The base does not exist, or it has an adapter of the name.
        """
        entry = self._model(base)
        if name in entry.adapters:
            raise SettingsError(f"model {base!r} has an adapter {name!r} already; remove it first")
        adapters = {**entry.adapters, name: self._written(directory)}
        self.models[entry.name] = msgspec.structs.replace(entry, adapters=adapters)

    def set_split(self, split: TrafficSplit) -> None:
        """Add a split, or replace the split of the same name."""
        self.splits[split.name] = split

    def remove(self, name: str) -> None:
        """
        Remove a model with its aliases and adapters, or one adapter, or a split.

        Raises:
            SettingsError: None of them exists.
        """
        if name in self.splits:
            del self.splits[name]
            return
        if name in self.models:
            del self.models[ModelName(name)]
            return
        for entry in self.models.values():
            if name in entry.adapters:
                left = {key: path for key, path in entry.adapters.items() if key != name}
                self.models[entry.name] = msgspec.structs.replace(entry, adapters=left)
                return
        raise SettingsError(self._unknown(name))

    def _model(self, name: str) -> ModelEntry:
        entry = self.models.get(ModelName(name))
        if entry is None:
            raise SettingsError(self._unknown(name))
        return entry

    def _unknown(self, name: str) -> str:
        known = ", ".join(sorted([*self.models, *self.splits])) or "none"
        return f"{self.path} has no model {name!r}; its models: {known}"

    def _with_written_path(self, entry: ModelEntry) -> ModelEntry:
        adapters = {name: self._written(Path(path)) for name, path in entry.adapters.items()}
        path = self._written(Path(entry.path))
        return msgspec.structs.replace(entry, path=path, adapters=adapters)

    def _written(self, directory: Path) -> str:
        """The path of *directory* in the file: relative if the directory is beside the file."""
        root, absolute = self.path.absolute().parent, directory.absolute()
        return str(absolute.relative_to(root) if absolute.is_relative_to(root) else absolute)


@contextlib.contextmanager
def registry_edit(path: Path) -> Iterator[RegistryEdit]:
    """
    Context in which a registry file is changed by one writer at a time, and after which readers
    find either the whole old or the whole new file. A missing file is created.

    Raises:
        SettingsError: The file is invalid, before or after the change; then it is not written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        edit = RegistryEdit(path)
        before = None
        if path.exists():
            before = decode_registry(path, read_registry(path))
            edit.models = {entry.name: entry for entry in before.models}
            edit.splits = {split.name: split for split in before.splits}
        yield edit
        after = RegistryFile(models=tuple(edit.models.values()), splits=tuple(edit.splits.values()))
        if after == before:
            return
        content = encode_registry(after)
        ModelRegistry.of_file(path, content)  # refuses names that clash
        _write_whole(path, content)


def _write_whole(path: Path, content: bytes) -> None:
    """Replace the file *path*, also if it is a symbolic link to a file."""
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(target)
