"""Models that are added to the registry file while a process runs."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.runtime.tasks import every

log = structlog.get_logger()
PERIOD_S: Seconds = 0.3
"""Period of looking for additions."""


class RegistryAdditions:
    """
    Finds models that were added to a registry file. Changes of known models and removals need a
    restart of the process.

    Args:
        path: The registry file.
        registry: Models that the process knows.
    """

    def __init__(self, path: Path, registry: ModelRegistry) -> None:
        self._path = path
        self._registry = registry
        self._version = self._current()
        self._refused: dict[ModelName, str] = {}
        """Model that could not be added -> the error that was logged."""

    async def follow(
        self,
        stop: asyncio.Event,
        prepare: Callable[[ModelEntry], Awaitable[None]] | None = None,
    ) -> None:
        """
        Add new models to the registry until *stop*.

        A model that cannot be added is logged once for each error, and tried again: its files may
        be copied after the registry file.

        Args:
            stop: Ends the search.
            prepare: Called with each model before it is in the registry.
        """

        async def check() -> None:
            for entry in self.read():
                try:
                    if prepare is not None:
                        await prepare(entry)
                    self._registry.add(entry)
                except Exception as error:  # one model must not stop the others
                    self._version = None  # read the file again
                    if self._refused.get(entry.name) != str(error):
                        log.exception("model.refused", model=entry.name, error=str(error))
                    self._refused[entry.name] = str(error)
                else:
                    log.info("model.added", model=entry.name)

        await every(PERIOD_S, check, stop=stop)

    def read(self) -> tuple[ModelEntry, ...]:
        """Entries of new models, if the file has changed; an invalid file is logged and skipped."""
        version = self._current()
        if version == self._version:
            return ()
        self._version = version
        try:
            found = ModelRegistry.load(self._path)
        except SettingsError as error:
            log.warning("registry.refused", path=str(self._path), error=str(error))
            return ()
        known = self._registry.bases
        return tuple(found.entry(base) for base in found.bases if base not in known)

    def _current(self) -> tuple[int, int] | None:
        try:
            state = self._path.stat()
        except OSError:
            return None
        return state.st_mtime_ns, state.st_size
