"""`headway-estimator fit`: fits quantile trees of prefill times."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec.structs import replace

from services.estimator.cli_trees import in_force, trees_directory
from services.estimator.settings import Settings
from services.estimator.telemetry_adapters import ProfileKey
from services.estimator.trees import artefacts
from services.estimator.trees.artefact_names import directory_name, display_name
from services.estimator.trees.artefacts import Artefact
from services.estimator.trees.fit_report import FitReport, Outcome, lines_of
from services.estimator.trees.sample_files import Samples, read_samples
from shared.contracts.errors import MeshError, TooFewSamplesError
from shared.runtime.cli import print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import LOADED, AsJson, Folder, Name

NO_SAMPLES = (
    "samples come from routed requests (grouper.routing) while an estimator runs with this "
    "profile_dir"
)
FILTERS = ("model", "engine", "device")


async def fit(
    *,
    settings: Annotated[Settings, LOADED],
    samples: Folder | None = None,
    model: Name | None = None,
    engine: Name | None = None,
    device: Name | None = None,
    dry_run: bool = False,
    force: bool = False,
    json: AsJson = False,
) -> int:
    """
    Fit trees for each (model, engine, device); write them unless the trees in force are better.

    Args:
        samples: Directory of samples; default: `samples` in profile_dir.
        model: Fit only samples of this model.
        engine: Fit only samples of this engine.
        device: Fit only samples of this device.
        dry_run: Fit and report, without writing trees.
        force: Also write trees that are worse than the trees in force.
    """
    directory = trees_directory(settings)
    by_key = _read(samples or directory.parent / "samples", settings.trees.max_samples)
    outcomes = []
    for key in _chosen((model, engine, device), list(by_key)):
        try:
            report = _fit_one(key, by_key[key], directory, dry_run=dry_run, force=force)
        except OSError as error:
            raise MeshError(f"trees of {display_name(key)} cannot be written: {error}") from error
        outcomes.append(report.outcome)
        if json:
            print_data(report, as_json=True)
        else:
            print("\n".join(lines_of(report)))
    return exit_code(outcomes)


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """
    Return failure if the trees of a key were worse, or if no trees were fitted.

    A recently added model has too few samples, which alone is not a failure.
    """
    if Outcome.WORSE in outcomes or set(outcomes) <= {Outcome.TOO_FEW}:
        return EXIT_FAILED
    return EXIT_OK


def _read(directory: Path, most: int) -> dict[ProfileKey, Samples]:
    """Read the samples of each (model, engine, device); print skipped parts to standard error."""
    try:
        found = read_samples(directory, most=most)
    except FileNotFoundError:
        raise MeshError(f"no samples in {directory}: {NO_SAMPLES}") from None
    except OSError as error:
        raise MeshError(f"samples cannot be read: {error}") from error
    for problem in found.problems:
        print(problem, file=sys.stderr)
    if not found.by_key:
        raise MeshError(f"no samples in {directory}: {NO_SAMPLES}")
    return found.by_key


def _chosen(filters: Sequence[str | None], keys: Sequence[ProfileKey]) -> Sequence[ProfileKey]:
    """
    Keys (model, engine, device) that match the filters.

    Raises an error with the existing names if no key matches.
    """
    chosen = keys
    for place, (name, asked) in enumerate(zip(FILTERS, filters, strict=True)):
        names = sorted({key[place] for key in keys})
        if asked is None:
            continue
        if asked not in names:
            raise MeshError(f"no samples of {name} {asked!r}; available: {', '.join(names)}")
        chosen = [key for key in chosen if key[place] == asked]
    if not chosen:
        available = "; ".join(map(display_name, keys))
        raise MeshError(f"no samples of this combination; available: {available}")
    return chosen


def _fit_one(
    key: ProfileKey, samples: Samples, directory: Path, *, dry_run: bool, force: bool
) -> FitReport:
    # Only fitting loads scikit-learn, which the service in the same package does not need.
    from services.estimator.trees.fitting import fit_samples  # noqa: PLC0415 - see above

    earlier = in_force(directory / directory_name(key))
    count = len(samples.prefill_s)
    print(f"fitting {display_name(key)} to {count} samples", file=sys.stderr, flush=True)
    model, engine, device = key
    report = FitReport(
        model=model,
        engine=engine,
        device=device,
        outcome=Outcome.TOO_FEW,
        samples=count,
        span_s=float(samples.at.max() - samples.at.min()),
        in_force_version=earlier.version if earlier else None,
    )
    try:
        fitted = fit_samples(key, samples, earlier, now=SystemClock().now())
    except TooFewSamplesError as error:
        return replace(report, detail=f"not fitted: without the latest fifth, {error}")
    report = replace(
        report,
        outcome=Outcome.DRY_RUN,
        detail="not written: a dry run",
        held_out=fitted.artefact.held_out,
        in_force_losses=tuple((each.level, each.loss_s) for each in fitted.in_force),
        relative_loss=fitted.relative_loss,
        num_bytes=fitted.num_bytes,
        fit_s=fitted.fit_s,
    )
    if fitted.is_worse and not force:
        return replace(report, outcome=Outcome.WORSE, detail=_why_worse(report))
    return report if dry_run else _written(report, directory, fitted.artefact)


def _why_worse(report: FitReport) -> str:
    from services.estimator.trees.fitting import WORSE_MARGIN  # noqa: PLC0415 - as in `_fit_one`

    return (
        f"not written: the loss is {report.relative_loss:.3f} times that of "
        f"v{report.in_force_version}, averaged over levels; the limit is {1 + WORSE_MARGIN:g} "
        "times; use --force to write it"
    )


def _written(report: FitReport, directory: Path, artefact: Artefact) -> FitReport:
    written, file = artefacts.write(directory, artefact)
    size, fit_s = 1e-3 * (report.num_bytes or 0), report.fit_s or 0.0
    return replace(
        report,
        outcome=Outcome.WRITTEN,
        detail=f"v{written.version} written, {size:.0f} kB, fitted in {fit_s:.1f} s: {file}",
        version=written.version,
        file=str(file),
    )
