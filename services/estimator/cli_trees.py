"""`headway-estimator trees` and `use`: what was fitted, and the way back."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from services.estimator import artefacts
from services.estimator.artefacts import Artefact
from services.estimator.keys import directory_name, told
from services.estimator.settings import Settings
from services.estimator.tables import age, shares
from shared.contracts.base import UnixTime
from shared.contracts.errors import ContractError, SchemaMismatchError, SettingsError
from shared.runtime.cli import print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK


class _Listed(msgspec.Struct, frozen=True):
    """One line of `--json`: an artefact without its trees."""

    model: str
    engine: str
    device: str
    version: int
    created_at: UnixTime
    samples: int
    held_out: artefacts.HeldOut
    versions: Sequence[int]
    """That there are."""


async def trees(settings: Settings, arguments: argparse.Namespace) -> int:
    """List each key's trees in force."""
    found = list(_listed(_directory(settings)))
    if not found:
        return _failed(f"no trees in {_directory(settings)}: `headway-estimator fit` makes some")
    now = SystemClock().now()
    for each in found:
        if arguments.json:
            print_data(each, as_json=True)
        else:
            print(_line(each, now))
    return EXIT_OK


def use_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `use`."""
    for name in ("model", "engine", "device"):
        parser.add_argument(f"--{name}", metavar="NAME", required=True, help=f"{name} of the trees")
    parser.add_argument("--version", type=int, metavar="N", required=True, help="to go back to")


async def use(settings: Settings, arguments: argparse.Namespace) -> int:
    """The highest version is in force: what is to be gone back to becomes that."""
    directory = _directory(settings)
    key = (arguments.model, arguments.engine, arguments.device)
    try:
        existing = dict(artefacts.versions(directory / directory_name(key)))
        if arguments.version not in existing:
            known = ", ".join(f"v{version}" for version in existing) or "none"
            return _failed(f"no v{arguments.version} of {told(key)}; there are: {known}")
        written, file = artefacts.write(directory, artefacts.read(existing[arguments.version]))
    except (OSError, ContractError, SchemaMismatchError) as error:
        return _failed(str(error))
    if arguments.json:
        print_data(_of(written, [*existing, written.version]), as_json=True)
    else:
        print(f"v{written.version} is v{arguments.version} again: {file}")
    return EXIT_OK


def _directory(settings: Settings) -> Path:
    if settings.trees_directory is None:
        raise SettingsError("profile_dir is not set: trees are in there")
    return settings.trees_directory


def _listed(directory: Path) -> Iterator[_Listed]:
    problems: list[str] = []
    for folder in artefacts.folders(directory):
        if (artefact := artefacts.latest(folder, problems)) is not None:
            yield _of(artefact, [version for version, _ in artefacts.versions(folder)])
    for problem in problems:
        print(problem, file=sys.stderr)


def _of(artefact: Artefact, versions: Sequence[int]) -> _Listed:
    return _Listed(
        model=artefact.model,
        engine=artefact.engine,
        device=artefact.device,
        version=artefact.version,
        created_at=artefact.created_at,
        samples=artefact.samples,
        held_out=artefact.held_out,
        versions=versions,
    )


def _line(each: _Listed, now: UnixTime) -> str:
    coverage = [(level.level, level.coverage) for level in each.held_out.levels]
    key = told((each.model, each.engine, each.device))
    made = f"v{each.version}, {age(each.created_at, now)}, of {each.samples} samples"
    return f"{key}: {made}; {shares(coverage)} when fitted"


def _failed(message: str) -> int:
    print(f"headway-estimator: {message}", file=sys.stderr)
    return EXIT_FAILED
