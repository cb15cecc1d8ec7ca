"""
Fitted trees on disk: `<directory>/<key>/v<N>.json`, each written once and atomically.

`headway-estimator fit` writes artefacts; a running estimator publishes each key's highest version.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from services.estimator.telemetry_adapters import ProfileKey
from services.estimator.trees.artefact_names import directory_name
from shared.contracts.base import UnixTime
from shared.contracts.errors import ContractError, SchemaMismatchError
from solver.prediction.prefill.quantile_judgement import Judged

_FILE = re.compile(r"v([1-9]\d{0,8})\.json")


class LevelHeldOut(Judged, frozen=True):
    """Quality of one quantile level on held-out samples."""

    constant_loss_s: float
    """Mean pinball loss if one constant quantile is predicted for all requests."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Quality of the trees' predictions on held-out samples."""

    samples: int
    levels: tuple[LevelHeldOut, ...]
    mean_ratio: float
    """Sum of predicted mean times divided by sum of measured times, over all held-out samples."""


class Artefact(msgspec.Struct, frozen=True, kw_only=True):
    """Trees of one (model, engine, device) with their origin and quality."""

    model: str
    engine: str
    device: str
    version: int
    created_at: UnixTime
    samples: int
    """Number of training samples of the trees, without the held-out samples."""
    first_at: UnixTime
    last_at: UnixTime
    """Time at which a router published the last of the samples."""
    held_out: HeldOut
    trees: msgspec.Raw
    """Trees, encoded by `solver.prediction.prefill.quantile_trees.encode`."""

    @property
    def key(self) -> ProfileKey:
        return self.model, self.engine, self.device

    @property
    def coverage(self) -> tuple[tuple[float, float], ...]:
        """
        Pairs (quantile level, share of held-out samples below the quantile), in order of levels.
        """
        return tuple((each.level, each.coverage) for each in self.held_out.levels)


def versions(folder: Path) -> dict[int, Path]:
    """
    Versions of the trees of one (model, engine, device), lowest first; empty without a folder.

    Raises:
        OSError: The folder cannot be read.
    """
    if not folder.is_dir():
        return {}
    matched = ((_FILE.fullmatch(file.name), file) for file in folder.iterdir())
    return dict(sorted((int(match[1]), file) for match, file in matched if match))


def read(file: Path) -> Artefact:
    """
    Read the artefact in *file*, with trees that can be evaluated.

    Raises:
        SchemaMismatchError: The trees have other features, or the key or version differs from the
            path; the message names the field.
        ContractError: The file is not an artefact; the message names the place of the error.
        OSError: The file cannot be read.
    """
    # Loads numba, which an estimator without trees does not need.
    from solver.prediction.prefill.quantile_trees import decode  # noqa: PLC0415 - see above

    try:
        artefact = msgspec.json.decode(file.read_bytes(), type=Artefact)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ContractError(f"not an artefact of trees: {error}") from error
    decode(bytes(artefact.trees))
    SchemaMismatchError.check(
        key=(file.parent.name, directory_name(artefact.key)),
        version=(file.name, f"v{artefact.version}.json"),
    )
    return artefact


def latest(files: Sequence[Path], refuse: Callable[[Path, Exception], None]) -> Artefact | None:
    """
    The artefact in the highest readable version of *files*; None if no file is readable.

    Calls *refuse* with each unreadable file of a higher version and its error.
    """
    for file in reversed(files):
        try:
            return read(file)
        except (SchemaMismatchError, ContractError, OSError) as error:
            refuse(file, error)
    return None


def write(directory: Path, artefact: Artefact) -> tuple[Artefact, Path]:
    """
    Write *artefact* as the next version of its key.

    Returns:
        The artefact with its new version, and its file.

    Raises:
        OSError: The file cannot be written; nothing has changed.
    """
    folder = directory / directory_name(artefact.key)
    folder.mkdir(parents=True, exist_ok=True)
    version = max(versions(folder), default=0) + 1
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
    Folders with trees, one per (model, engine, device); empty if the directory does not exist.

    Raises:
        OSError: The directory cannot be read.
    """
    if not directory.is_dir():
        return ()
    return sorted(each for each in directory.iterdir() if each.is_dir())
