"""Follows the registry file while a process runs."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import RegistryState
from shared.models.registry import ModelRegistry, digest_of, read_registry
from shared.runtime.tasks import every

log = structlog.get_logger()
PERIOD_S: Seconds = 0.3
"""Period of reading the file."""
LIVE_FIELDS = frozenset({"aliases", "adapters"})
"""Fields of an entry that may change while the model is served."""


class RegistrySteps(Protocol):
    """
    What a process does about changes of the registry. A step that raises is tried again: the files
    of a model may be copied after the registry file.
    """

    async def add(self, entry: ModelEntry) -> None:
        """Prepare for a model, before requests can name it."""

    async def replace(self, entry: ModelEntry) -> None:
        """Prepare for other aliases and adapters of a model, before requests can name them."""

    async def remove(self, model: ModelName) -> None:
        """Begin to release a model, which new requests cannot name any more."""


class NoSteps:
    """Steps of a process that only resolves names."""

    async def add(self, entry: ModelEntry) -> None: ...

    async def replace(self, entry: ModelEntry) -> None: ...

    async def remove(self, model: ModelName) -> None: ...


class RegistryWatch:
    """
    Applies the changes of a registry file to the registry of the process.

    The file is compared by content, since a file that is replaced by a link may keep its time. A
    model's `aliases` and `adapters` may change while it is served; another change of its entry is
    refused until the entry is removed and added again.

    Args:
        path: The registry file.
        registry: Models that the process knows, loaded from the file; updated here.
        steps: What the process does about changes.
    """

    def __init__(self, path: Path, registry: ModelRegistry, steps: RegistrySteps) -> None:
        self._path = path
        self._registry = registry
        self._steps = steps
        self._read = registry.digest
        """Digest of the content that was read last, valid or not."""
        self._refused = ""
        """Error of an invalid file that was logged."""
        self._wanted = registry
        """The valid content that was read last."""
        self._pending: dict[str, str] = {}

    @property
    def state(self) -> RegistryState:
        """Version of the registry that the process follows, and what of it has no effect yet."""
        return RegistryState(
            digest=self._wanted.digest,
            pending={str(model): reason for model, reason in self._pending.items()},
        )

    def sees(self, name: str) -> bool:
        """
        Return whether the file has the model *name* now, also before the process follows it. May be
        called in any thread.
        """
        try:
            content, wanted = read_registry(self._path), self._wanted
            if digest_of(content) == wanted.digest:
                return name in wanted.names
            return name in ModelRegistry.of_file(self._path, content).names
        except SettingsError:
            return False

    async def follow(self, stop: asyncio.Event) -> None:
        """Apply changes of the file until *stop*."""
        await every(PERIOD_S, self.apply, stop=stop)

    async def apply(self) -> None:
        """Read the file if its content has changed, and apply what has no effect yet."""
        if not self._has_changed() and not self._pending:
            return
        known, wanted = self._registry, self._wanted
        pending, self._pending = self._pending, {}
        self._announce()
        for model in known.bases:
            if model not in wanted.bases:
                await self._remove(model)
        for model in wanted.bases:
            entry = wanted.entry(model)
            if model not in known.bases:
                await self._try(entry, "model.added", self._add, pending)
            elif entry != known.entry(model):
                await self._try(entry, "model.changed", self._replace, pending)
        known.set_splits(wanted.splits)
        self._announce()

    def _has_changed(self) -> bool:
        """Read the file; an invalid one is logged once, and the last valid one stays in effect."""
        try:
            content = read_registry(self._path)
            if (digest := digest_of(content)) == self._read:
                return False
            self._read = digest
            self._wanted = ModelRegistry.of_file(self._path, content)
        except SettingsError as error:
            if self._refused != str(error):
                log.warning("registry.refused", path=str(self._path), error=str(error))
            self._refused = str(error)
            return False
        self._refused = ""
        log.info("registry.changed", digest=digest)
        return True

    def _announce(self) -> None:
        """Mark the names that are in the file and not yet in the registry."""
        self._registry.expected = frozenset(self._wanted.names) - frozenset(self._registry.names)

    async def _remove(self, model: ModelName) -> None:
        self._registry.remove(model)
        await self._steps.remove(model)
        log.info("model.removed", model=model)

    async def _add(self, entry: ModelEntry) -> None:
        await self._steps.add(entry)
        self._registry.add(entry)

    async def _replace(self, entry: ModelEntry) -> None:
        changed = _changed_fields(self._registry.entry(entry.name), entry)
        if refused := sorted(changed - LIVE_FIELDS):
            raise SettingsError(
                f"{', '.join(refused)} of a served model cannot change: remove the model, wait "
                "until all agents have released it, and add it again"
            )
        await self._steps.replace(entry)
        self._registry.replace(entry)

    async def _try(
        self,
        entry: ModelEntry,
        event: str,
        change: Callable[[ModelEntry], Awaitable[None]],
        logged: dict[str, str],
    ) -> None:
        """Carry out *change* for *entry*; an error that was not *logged* before is logged."""
        model = entry.name
        try:
            await change(entry)
        except Exception as error:  # one model must not stop the others
            self._pending[model] = str(error)
            if logged.get(model) != str(error):
                log.exception("model.refused", model=model, error=str(error))
        else:
            log.info(event, model=model)


def _changed_fields(before: ModelEntry, after: ModelEntry) -> set[str]:
    old, new = msgspec.structs.asdict(before), msgspec.structs.asdict(after)
    return {name for name in new if new[name] != old[name]}
