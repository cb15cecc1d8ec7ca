"""Trees in force: the latest artefact of each (model, engine, device), reloaded as they change."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from services.estimator import artefacts
from services.estimator.artefacts import Artefact
from services.estimator.observations import ProfileKey
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_softly
from shared.contracts.base import ModelName, encode, tag_of
from shared.contracts.errors import ContractError, SchemaMismatchError
from shared.contracts.estimates import TreesInForce
from shared.contracts.routing import PrefillTrees

log = structlog.get_logger()

_Stamp = tuple[int, int, int]
"""Of a file as it was looked at: inode, ns of its last change, bytes."""
_ABSENT: _Stamp = (0, 0, 0)
_UNREADABLE = "unreadable"


class TreesWatch:
    """
    What routers are to predict by.

    A version that was in force stays so until a higher one can be read, whatever becomes of its
    file: versions that routers are told of only ever rise.

    Args:
        directory: As `artefacts` lays it out; it may come later. None has nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._in_force: dict[ProfileKey, Artefact] = {}
        self._versions: dict[str, int] = {}
        """In force, by folder."""
        self._refused: dict[Path, _Stamp] = {}
        self.refused: Counter[str] = Counter()
        """Files by what is wrong with them; one that was changed counts again."""

    @property
    def in_force(self) -> Sequence[Artefact]:
        return tuple(self._in_force.values())

    def told(self, key: ProfileKey) -> TreesInForce | None:
        """What a profile says of its trees."""
        if (artefact := self._in_force.get(key)) is None:
            return None
        return TreesInForce(
            version=artefact.version,
            at=artefact.created_at,
            samples=artefact.samples,
            coverage=artefact.coverage,
        )

    def look(self) -> Sequence[Artefact]:
        """Those that came into force since the last look. Reads no file twice."""
        return [each for folder in self._folders() if (each := self._newer(folder)) is not None]

    def _folders(self) -> Sequence[Path]:
        if self._directory is None:
            return ()
        try:
            return artefacts.folders(self._directory)
        except OSError as error:
            self._refuse(self._directory, _UNREADABLE, error)
            return ()

    def _newer(self, folder: Path) -> Artefact | None:
        known = self._versions.get(folder.name, 0)
        try:
            versions = artefacts.versions(folder)
        except OSError as error:
            self._refuse(folder, _UNREADABLE, error)
            return None
        for version, file in reversed(versions):
            if version <= known:
                break
            if (artefact := self._read(file)) is not None:
                self._versions[folder.name] = version
                self._in_force[artefact.key] = artefact
                return artefact
        return None

    def _read(self, file: Path) -> Artefact | None:
        if self._refused.get(file) == _stamp_of(file):
            return None
        try:
            return artefacts.read(file)
        except SchemaMismatchError as error:
            self._refuse(file, "schema", error)
        except ContractError as error:
            self._refuse(file, "broken", error)
        except OSError as error:
            self._refuse(file, _UNREADABLE, error)
        return None

    def _refuse(self, path: Path, reason: str, error: Exception) -> None:
        """Once for each path, until it changes."""
        stamp = _stamp_of(path)
        if self._refused.get(path) == stamp:
            return
        self._refused[path] = stamp
        self.refused[reason] += 1
        field = error.field if isinstance(error, SchemaMismatchError) else None
        log.warning("trees.refused", file=str(path), reason=reason, field=field, error=str(error))


def tree_messages(found: Sequence[Artefact]) -> Iterator[OutMessage]:
    """Artefacts as routers are told of them."""
    for artefact in found:
        trees = PrefillTrees(
            model=ModelName(artefact.model),
            engine=artefact.engine,
            device=artefact.device,
            version=artefact.version,
            at=artefact.created_at,
            trees=artefact.trees,
        )
        yield OutMessage(body=encode(trees), kind=tag_of(PrefillTrees), persistent=False)


async def publish_trees(broker: Broker, found: Sequence[Artefact]) -> None:
    """Tell all services of *found*."""
    for message in tree_messages(found):
        await send_softly(broker, topology.PROFILES, "", message)


def _stamp_of(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return _ABSENT
    return status.st_ino, status.st_mtime_ns, status.st_size
