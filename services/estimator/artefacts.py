"""
Fitted trees on disk: `<directory>/<key>/v<N>.json`, each written once and whole.

`headway-estimator fit` writes them; a running estimator publishes the highest version of a key.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.estimator.keys import directory_name
from services.estimator.observations import ProfileKey
from shared.contracts.base import UnixTime
from shared.contracts.errors import ContractError, SchemaMismatchError
from solver.prediction.prefill_features import FEATURES, SCHEMA_VERSION

_FILE = re.compile(r"v([1-9]\d{0,8})\.json")


class LevelHeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """A level's quantiles on samples that were not learnt of."""

    level: float
    loss_s: float
    """Mean pinball loss."""
    constant_loss_s: float
    """The same of one quantile for all requests."""
    coverage: float
    """Share of samples within the quantile, 0..1."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the trees' predictions before they were used."""

    samples: int
    levels: tuple[LevelHeldOut, ...]
    mean_ratio: float
    """Expected over measured time, of all samples together."""


class Artefact(msgspec.Struct, frozen=True, kw_only=True):
    """Trees of one (model, engine, device), and what they rest on."""

    model: str
    engine: str
    device: str
    version: int
    created_at: UnixTime
    schema_version: int
    features: tuple[str, ...]
    levels: tuple[float, ...]
    samples: int
    """Learnt of; those to judge by are not among them."""
    first_at: UnixTime
    last_at: UnixTime
    """Between which routers told of the samples."""
    held_out: HeldOut
    trees: msgspec.Raw
    """As `solver.prediction.quantile_trees.encode` gives them."""

    @property
    def key(self) -> ProfileKey:
        return self.model, self.engine, self.device

    @property
    def coverage(self) -> tuple[tuple[float, float], ...]:
        """(Level, held-out share within its quantile), levels rising."""
        return tuple((each.level, each.coverage) for each in self.held_out.levels)


class _Header(msgspec.Struct):
    schema_version: int
    features: tuple[str, ...]


def versions(folder: Path) -> list[tuple[int, Path]]:
    """
    The versions of one key, the lowest first; none if there is no such folder.

    Raises:
        OSError: The folder cannot be read.
    """
    if not folder.is_dir():
        return []
    matched = ((_FILE.fullmatch(file.name), file) for file in folder.iterdir())
    return sorted((int(match[1]), file) for match, file in matched if match)


def read(file: Path) -> Artefact:
    """
    The artefact in *file*, whose trees can be evaluated.

    Raises:
        SchemaMismatchError: It is of other features, of another key or version than its file's
            place says, or of other levels than its trees; names the field.
        ContractError: It is no artefact; says where.
        OSError: It cannot be read.
    """
    # Loads numba, which an estimator that has no trees does without.
    from solver.prediction.quantile_trees import decode  # noqa: PLC0415 - see above

    body = file.read_bytes()
    try:
        header = msgspec.json.decode(body, type=_Header)
        _refuse_other("schema_version", expected=SCHEMA_VERSION, found=header.schema_version)
        _refuse_other("features", expected=FEATURES, found=header.features)
        artefact = msgspec.json.decode(body, type=Artefact)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ContractError(f"no trees' artefact: {error}") from error
    _refuse_other("key", expected=file.parent.name, found=directory_name(artefact.key))
    _refuse_other("version", expected=file.name, found=f"v{artefact.version}.json")
    _refuse_other("levels", expected=decode(bytes(artefact.trees)).levels, found=artefact.levels)
    return artefact


def latest(folder: Path, problems: list[str]) -> Artefact | None:
    """The highest version that can be read; appends to *problems* what was wrong with higher."""
    for _, file in reversed(versions(folder)):
        try:
            return read(file)
        except (SchemaMismatchError, ContractError, OSError) as error:
            problems.append(f"{file}: {error}")
    return None


def write(directory: Path, artefact: Artefact) -> tuple[Artefact, Path]:
    """
    Write *artefact* as its key's next version.

    Returns:
        The artefact with the version that it got, and its file.

    Raises:
        OSError: It cannot be written; nothing has changed.
    """
    folder = directory / directory_name(artefact.key)
    folder.mkdir(parents=True, exist_ok=True)
    existing = versions(folder)
    version = existing[-1][0] + 1 if existing else 1
    artefact = msgspec.structs.replace(artefact, version=version)
    file = folder / f"v{version}.json"
    part = folder / f"v{version}.{os.getpid()}.part"
    try:
        part.write_bytes(msgspec.json.encode(artefact))
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return artefact, file


def folders(directory: Path) -> Sequence[Path]:
    """
    Those of all keys; none while there is no such directory.

    Raises:
        OSError: It cannot be read.
    """
    if not directory.is_dir():
        return ()
    return sorted(each for each in directory.iterdir() if each.is_dir())


def _refuse_other(field: str, *, expected: object, found: object) -> None:
    if expected != found:
        raise SchemaMismatchError(field, expected=expected, found=found)
