"""Trees in force: the highest artefact of each (model, engine, device), reloaded after changes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from services.estimator.telemetry_adapters import ProfileKey
from services.estimator.trees import artefacts
from services.estimator.trees.artefact_names import directory_name
from services.estimator.trees.artefacts import Artefact
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError, SchemaMismatchError
from shared.contracts.estimates import TreesInForce
from shared.contracts.routing import PrefillTrees

log = structlog.get_logger()

_Stamp = tuple[int, int, int]
"""State of a file when it was read: inode, time of its last change in ns, size in bytes."""
_ABSENT: _Stamp = (0, 0, 0)
_REASONS = {SchemaMismatchError: "schema", ContractError: "broken"}
"""
Type of error -> reason for refusing a file of trees; other errors have the reason `unreadable`.
"""
T = TypeVar("T")


class TreesWatch:
    """
    Trees in force, which routers use for predictions.

    Published versions only increase: a version stays in force until a higher one can be read, even
    if its file changes or disappears.

    Args:
        directory: Directory with the layout of `artefacts`, which may not exist yet. None: there
            are no trees.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._in_force: dict[str, Artefact] = {}
        """Folder name of a (model, engine, device) -> its trees in force."""
        self._refused: dict[Path, _Stamp] = {}
        self.refused: Counter[str] = Counter()
        """Number of refused tree files by kind of error; a file counts again when it changes."""

    @property
    def in_force(self) -> Sequence[Artefact]:
        return tuple(self._in_force.values())

    def in_force_for(self, key: ProfileKey) -> TreesInForce | None:
        """Summary of the trees in force for a profile."""
        if (artefact := self._in_force.get(directory_name(key))) is None:
            return None
        return TreesInForce(
            version=artefact.version,
            at=artefact.created_at,
            samples=artefact.samples,
            coverage=artefact.coverage,
        )

    def look(self) -> Sequence[Artefact]:
        """Trees that came into force since the last call; reads only new and changed files."""
        if self._directory is None:
            return ()
        found = []
        for folder in self._listed(artefacts.folders, self._directory) or ():
            artefact = artefacts.latest(self._candidates(folder), self._refuse)
            if artefact is not None:
                self._in_force[folder.name] = artefact
                found.append(artefact)
        return found

    def _candidates(self, folder: Path) -> Sequence[Path]:
        """
        Tree files with higher versions than the version in force, except files known to be invalid.
        """
        known = self._in_force.get(folder.name)
        versions = self._listed(artefacts.versions, folder) or {}
        return [
            file
            for version, file in versions.items()
            if (known is None or version > known.version)
            and self._refused.get(file) != _stamp_of(file)
        ]

    def _listed(self, listing: Callable[[Path], T], directory: Path) -> T | None:
        try:
            return listing(directory)
        except OSError as error:
            self._refuse(directory, error)
            return None

    def _refuse(self, path: Path, error: Exception) -> None:
        """Count and log an invalid tree file, once for each change of the file."""
        stamp = _stamp_of(path)
        if self._refused.get(path) == stamp:
            return
        self._refused[path] = stamp
        reason = _REASONS.get(type(error), "unreadable")
        self.refused[reason] += 1
        field = error.field if isinstance(error, SchemaMismatchError) else None
        log.warning("trees.refused", file=str(path), reason=reason, field=field, error=str(error))


def tree_messages(found: Sequence[Artefact]) -> Iterator[OutMessage]:
    """Convert artefacts to messages for routers."""
    for artefact in found:
        trees = PrefillTrees(
            model=ModelName(artefact.model),
            engine=artefact.engine,
            device=artefact.device,
            version=artefact.version,
            at=artefact.created_at,
            trees=artefact.trees,
        )
        yield OutMessage.transient(trees)


async def publish_trees(broker: Broker, found: Sequence[Artefact]) -> None:
    """Publish the trees *found* to all services."""
    for message in tree_messages(found):
        await send_best_effort(broker, topology.PROFILES, "", message)


def _stamp_of(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return _ABSENT
    return status.st_ino, status.st_mtime_ns, status.st_size
