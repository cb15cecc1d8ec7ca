"""
`headway-estimator trees` lists fitted trees; `headway-estimator use` selects earlier trees again.
"""

import sys
from pathlib import Path
from typing import Annotated

from services.estimator.settings import Settings
from services.estimator.text_table import age, shares
from services.estimator.trees import artefacts
from services.estimator.trees.artefact_names import directory_name, display_name
from services.estimator.trees.artefacts import Artefact
from shared.contracts.base import UnixTime
from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.cli import print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_OK
from shared.runtime.options import LOADED, AsJson, Name, whole

_LISTED = ("model", "engine", "device", "version", "created_at", "samples", "held_out")
"""Fields of a tree artefact that `--json` prints: all except the trees and their origin."""


async def trees(*, settings: Annotated[Settings, LOADED], json: AsJson = False) -> int:
    """List the trees in force for each (model, engine, device)."""
    directory = trees_directory(settings)
    listed = [artefact for each in artefacts.folders(directory) if (artefact := in_force(each))]
    if not listed:
        raise MeshError(f"no trees in {directory}: create trees with `headway-estimator fit`")
    now = SystemClock().now()
    for artefact in listed:
        if json:
            _print_json(artefact, directory)
        else:
            print(_line(artefact, now))
    return EXIT_OK


async def use(
    *,
    settings: Annotated[Settings, LOADED],
    model: Name,
    engine: Name,
    device: Name,
    version: Annotated[int, whole()],
    json: AsJson = False,
) -> int:
    """
    Write an earlier version of the trees again as the highest version, which takes effect.

    Args:
        model: Model of the trees.
        engine: Engine of the trees.
        device: Device of the trees.
        version: Version to roll back to.
    """
    directory = trees_directory(settings)
    key = (model, engine, device)
    try:
        existing = artefacts.versions(directory / directory_name(key))
        if version not in existing:
            known = ", ".join(f"v{version}" for version in existing) or "none"
            raise MeshError(f"no v{version} of {display_name(key)}; available: {known}")
        written, file = artefacts.write(directory, artefacts.read(existing[version]))
    except OSError as error:
        raise MeshError(str(error)) from error
    if json:
        _print_json(written, directory)
    else:
        print(f"v{written.version} is a copy of v{version}: {file}")
    return EXIT_OK


def trees_directory(settings: Settings) -> Path:
    """
    Directory of `services.estimator.trees.artefacts`.

    Raises:
        SettingsError: `profile_dir` is not set, so the directory does not exist.
    """
    if settings.trees_directory is None:
        raise SettingsError("profile_dir is not set: trees are stored there")
    return settings.trees_directory


def in_force(folder: Path) -> Artefact | None:
    """
    The highest readable version of the trees in *folder*; errors of higher versions are printed to
    standard error.
    """
    files = tuple(artefacts.versions(folder).values())
    return artefacts.latest(files, lambda file, error: print(f"{file}: {error}", file=sys.stderr))


def _print_json(artefact: Artefact, directory: Path) -> None:
    versions = tuple(artefacts.versions(directory / directory_name(artefact.key)))
    listed = {name: getattr(artefact, name) for name in _LISTED}
    print_data(listed | {"versions": versions}, as_json=True)


def _line(artefact: Artefact, now: UnixTime) -> str:
    made = f"v{artefact.version}, {age(artefact.created_at, now)}, of {artefact.samples} samples"
    return f"{display_name(artefact.key)}: {made}; {shares(artefact.coverage)} when fitted"
