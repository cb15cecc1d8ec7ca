"""Model registry: maps wire names to models on disk."""

import hashlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError, ModelNotReadyError, SettingsError
from shared.contracts.models import ModelEntry, TrafficSplit
from shared.contracts.requests import ModelRef
from shared.models.splits import check_split, target_of


class RegistryFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a registry file."""

    models: tuple[ModelEntry, ...]
    splits: tuple[TrafficSplit, ...] = ()


class ModelRegistry:
    """
    Resolves model names of requests to (base, adapter, revision).

    Args:
        entries: Base models; names, aliases and adapter names must not clash.
        digest: Digest of the file that contains the entries.
        splits: Names whose requests are divided among models.

    Raises:
        SettingsError: Two models have the same name, the fields of a model contradict its task, or
            a split has an unknown target.
    """

    def __init__(
        self,
        entries: Iterable[ModelEntry],
        digest: str = "",
        splits: Iterable[TrafficSplit] = (),
    ) -> None:
        self._splits: dict[str, TrafficSplit] = {}
        self._entries: dict[ModelName, ModelEntry] = {}
        self._refs: dict[str, ModelRef] = {}
        self._removed: dict[ModelName, ModelEntry] = {}
        self._former: dict[str, ModelRef] = {}
        """Name that a model has had -> the model."""
        self.digest = digest
        """Digest of the registry file."""
        self.expected: frozenset[str] = frozenset()
        """Names that the registry file has and that this process cannot serve yet."""
        self.is_expected: Callable[[str], bool] = lambda _name: False
        """Returns whether this process is about to know a name, which others may know already."""
        for entry in entries:
            self.add(entry)
        splits = tuple(splits)
        tasks = {name: self._entries[ref.base].task for name, ref in self._refs.items()}
        for split in splits:
            check_split(split, tasks)
        self.set_splits(splits)

    def add(self, entry: ModelEntry) -> None:
        """
        Add a base model with its aliases and adapters.

        Raises:
            SettingsError: Another model has one of the names, or the model's fields contradict its
                task; nothing is added.
        """
        check_entry(entry)
        refs = _refs_of(entry)
        for name in refs:
            if name in self._refs:
                raise SettingsError(f"two models in the registry have the name {name!r}")
        self._refs |= refs
        self._entries[entry.name] = entry
        self._removed.pop(entry.name, None)

    def remove(self, base: ModelName) -> None:
        """
        Remove a base model, which must exist, with its aliases and adapters. `entry` still returns
        its entry, which requests that were accepted before need.
        """
        entry = self._entries.pop(base)
        for name in _refs_of(entry):
            self._former[name] = self._refs.pop(name)
        self._removed[base] = entry

    def replace(self, entry: ModelEntry) -> None:
        """
        Replace the entry of a base model, which must exist.

        Raises:
            SettingsError: Another model has one of the names, or the model's fields contradict its
                task; nothing is changed.
        """
        earlier = self._entries[entry.name]
        self.remove(entry.name)
        try:
            self.add(entry)
        except SettingsError:
            self.add(earlier)
            raise

    @classmethod
    def load(cls, path: Path) -> "ModelRegistry":
        """
        Load the registry from a JSON file `{"models": [...]}`; directories become absolute.

        Raises:
            SettingsError: The file is missing or not valid JSON, has an unknown field, contains a
                name twice, or has a model whose fields contradict its task.
        """
        return cls.of_file(path, read_registry(path))

    @classmethod
    def of_file(cls, path: Path, content: bytes) -> "ModelRegistry":
        """
        The registry with the *content* of the file *path*; directories become absolute.

        Raises:
            SettingsError: As for `load`.
        """
        file = decode_registry(path, content)
        for entry in file.models:
            check_files(entry)
        root = path.resolve().parent
        entries = (_with_absolute_paths(each, root) for each in file.models)
        return cls(entries, digest_of(content), file.splits)

    def set_splits(self, splits: Iterable[TrafficSplit]) -> None:
        """
        Replace the names whose requests are divided among models.

        Raises:
            SettingsError: Two splits have one name.
        """
        found: dict[str, TrafficSplit] = {}
        for split in splits:
            if split.name in found:
                raise SettingsError(f"two splits in the registry have the name {split.name!r}")
            found[split.name] = split
        self._splits = found

    def split(self, name: str) -> TrafficSplit | None:
        """The split of a name; None if the name is that of a model, or unknown."""
        return None if name in self._refs else self._splits.get(name)

    def resolve(self, name: str, request_id: str = "") -> ModelRef:
        """
        Resolve the model name of a request. The name of a split resolves to one of its targets,
        which is the same for equal ids.

        Raises:
            ModelNotReadyError: The model was added to the registry a moment ago.
            ContractError: The name is unknown; the message lists the known names.
        """
        if (split := self.split(name)) is not None:
            return self.resolve(target_of(split, request_id))
        ref = self._refs.get(name)
        if ref is None:
            if name in self.expected or (name not in self._former and self.is_expected(name)):
                raise ModelNotReadyError(f"model {name!r} is not ready yet; try again")
            known = ", ".join(sorted(self.names)) or "none"
            raise ContractError(
                f"model {name[:80]!r} does not exist; known models: {known}",
                code="model_not_found",
                param="model",
                status=404,
            )
        return ref

    def removed(self, name: str) -> ModelRef | None:
        """The model that had *name* before it was removed; None if the name exists or never did."""
        is_used = name in self._refs or name in self._splits
        return None if is_used else self._former.get(name)

    def entry(self, base: ModelName) -> ModelEntry:
        """Return the entry of a base model, which must exist or have existed."""
        return self._entries.get(base) or self._removed[base]

    @property
    def names(self) -> tuple[str, ...]:
        """All model names that requests can use."""
        return (*self._refs, *(name for name in self._splits if name not in self._refs))

    @property
    def splits(self) -> tuple[TrafficSplit, ...]:
        """All names whose requests are divided among models."""
        return tuple(self._splits.values())

    @property
    def bases(self) -> tuple[ModelName, ...]:
        """All base models."""
        return tuple(self._entries)


def check_files(entry: ModelEntry) -> None:
    """
    Check that an entry has the fields of its form, and no others.

    Raises:
        SettingsError: A model that takes tokens has no directory, or a model that takes bodies has
            fields that only the mesh's own engines read.
    """
    if not entry.takes_bodies:
        if not entry.path:
            raise SettingsError(f"model {entry.name!r} has no path")
        return
    for name in ("path", "architecture", "engine_args", "tool_parser", "reasoning_parser"):
        if getattr(entry, name):
            raise SettingsError(
                f"model {entry.name!r} takes bodies, which its servers read, so it takes no {name}"
            )
    if entry.pools:
        raise SettingsError(f"model {entry.name!r} takes bodies, so its task must be `generate`")


def _refs_of(entry: ModelEntry) -> Mapping[str, ModelRef]:
    """
    Name -> model, for all names of *entry*.

    Raises:
        SettingsError: Two of the names are equal.
    """
    plain = ModelRef(name=entry.name, base=entry.name, revision=entry.revision)
    replace = msgspec.structs.replace
    refs = [plain, *(replace(plain, name=alias) for alias in entry.aliases)]
    refs += [replace(plain, name=name, adapter=name) for name in entry.adapters]
    names = [ref.name for ref in refs]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"two models in the registry have the name {name!r}")
    return {ref.name: ref for ref in refs}


def _with_absolute_paths(entry: ModelEntry, root: Path) -> ModelEntry:
    if entry.takes_bodies:
        return entry
    return msgspec.structs.replace(
        entry,
        path=str(root / entry.path),
        adapters={name: str(root / path) for name, path in entry.adapters.items()},
    )


def check_entry(entry: ModelEntry) -> None:
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


def read_registry(path: Path) -> bytes:
    """
    Content of the registry file *path*.

    Raises:
        SettingsError: The file cannot be read.
    """
    try:
        return path.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise SettingsError(f"cannot read the model registry {path}: {error}") from error


def decode_registry(path: Path, content: bytes) -> RegistryFile:
    """
    Decode the *content* of the registry file *path*, with directories as written there.

    Raises:
        SettingsError: The content is not valid JSON, or has an unknown field.
    """
    try:
        return msgspec.json.decode(content, type=RegistryFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"model registry {path}: {error}") from error


def digest_of(content: bytes) -> str:
    """Digest of a registry file, which is the version of the registry."""
    return hashlib.sha256(content).hexdigest()[:16]


def encode_registry(file: RegistryFile) -> bytes:
    """Content of a registry file."""
    return msgspec.json.format(msgspec.json.encode(file), indent=2)


def write_registry(path: Path, entries: Iterable[ModelEntry]) -> None:
    """Write *entries* as a registry file that `ModelRegistry.load` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_registry(RegistryFile(models=tuple(entries))))
