"""`headway-estimator fit`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from services.estimator import artefacts
from services.estimator.artefacts import Artefact
from services.estimator.fit_report import FitReport, Outcome, lines_of
from services.estimator.keys import directory_name, told
from services.estimator.observations import ProfileKey
from services.estimator.sample_files import Samples, read_samples
from services.estimator.settings import Settings
from shared.contracts.errors import SettingsError, TooFewSamplesError
from shared.runtime.cli import print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK

FILTERS = ("model", "engine", "device")


def fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `fit`."""
    parser.add_argument(
        "--samples", type=Path, metavar="DIR", help="default: `samples` in profile_dir"
    )
    for name in FILTERS:
        parser.add_argument(f"--{name}", metavar="NAME", help=f"only this {name}")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument(
        "--force", action="store_true", help="write trees that are worse than those in force, too"
    )


async def fit(settings: Settings, arguments: argparse.Namespace) -> int:
    """Fit trees of each key to its samples, and write those that are not worse as new versions."""
    trees_directory = settings.trees_directory
    if trees_directory is None:
        raise SettingsError("profile_dir is not set: there trees are written")
    directory = arguments.samples or trees_directory.parent / "samples"
    by_key = _read(directory, most=settings.trees.max_samples)
    if by_key is None:
        return EXIT_FAILED
    if (fault := _unknown_filter(arguments, list(by_key))) is not None:
        return _failed(fault)
    chosen = {key: each for key, each in by_key.items() if _chosen(arguments, key)}
    reports = []
    for key, samples in chosen.items():
        try:
            report = _fit_one(key, samples, trees_directory, arguments)
        except OSError as error:
            return _failed(f"trees of {told(key)} cannot be written: {error}")
        reports.append(report)
        if arguments.json:
            print_data(report, as_json=True)
        else:
            print("\n".join(lines_of(report)))
    return exit_code([report.outcome for report in reports])


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """
    Failed when trees were worse, or none were fitted.

    A model that came lately has few samples; that alone is no failure of the others.
    """
    if Outcome.WORSE in outcomes or set(outcomes) <= {Outcome.TOO_FEW}:
        return EXIT_FAILED
    return EXIT_OK


def _read(directory: Path, *, most: int) -> dict[ProfileKey, Samples] | None:
    """Samples by key; None, and why on standard error, when there are none."""
    try:
        found = read_samples(directory, most=most)
    except OSError as error:
        _failed(f"no samples: {error}")
        return None
    for problem in found.problems:
        print(problem, file=sys.stderr)
    by_key = {key: each for key, each in found.by_key.items() if len(each.prefill_s)}
    if not by_key:
        _failed(f"no samples in {directory}: has an estimator run with this profile_dir?")
        return None
    return by_key


def _unknown_filter(arguments: argparse.Namespace, keys: Sequence[ProfileKey]) -> str | None:
    """What is wrong with the filters, with the names that there are; None if nothing."""
    for place, name in enumerate(FILTERS):
        asked, names = getattr(arguments, name), sorted({key[place] for key in keys})
        if asked is not None and asked not in names:
            return f"no samples of {name} {asked!r}; there are those of {', '.join(names)}"
    if not any(_chosen(arguments, key) for key in keys):
        return f"no samples of these together; there are those of {'; '.join(map(told, keys))}"
    return None


def _chosen(arguments: argparse.Namespace, key: ProfileKey) -> bool:
    asked = (getattr(arguments, name) for name in FILTERS)
    return all(one is None or one == part for one, part in zip(asked, key, strict=True))


def _fit_one(
    key: ProfileKey, samples: Samples, directory: Path, arguments: argparse.Namespace
) -> FitReport:
    # Only who fits loads scikit-learn: the service is in the same package.
    from services.estimator.fitting import fit_samples  # noqa: PLC0415 - see above

    in_force = _in_force(directory / directory_name(key))
    count = len(samples.prefill_s)
    print(f"fitting {told(key)} to {count} samples", file=sys.stderr, flush=True)
    model, engine, device = key
    report = FitReport(
        model=model,
        engine=engine,
        device=device,
        outcome=Outcome.TOO_FEW,
        samples=count,
        span_s=float(samples.at.max() - samples.at.min()),
        in_force_version=in_force.version if in_force else None,
    )
    try:
        fitted = fit_samples(key, samples, in_force, now=SystemClock().now())
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
    if fitted.is_worse and not arguments.force:
        return replace(report, outcome=Outcome.WORSE, detail=_why_worse(report))
    return report if arguments.dry_run else _written(report, directory, fitted.artefact)


def _in_force(folder: Path) -> Artefact | None:
    problems: list[str] = []
    found = artefacts.latest(folder, problems)
    for problem in problems:
        print(problem, file=sys.stderr)
    return found


def _why_worse(report: FitReport) -> str:
    from services.estimator.fitting import WORSE_MARGIN  # noqa: PLC0415 - as in `_fit_one`

    return (
        f"not written: the loss is {report.relative_loss:.3f} times that of "
        f"v{report.in_force_version}, in the mean over levels, and {1 + WORSE_MARGIN:g} times is "
        "the most; --force writes it nevertheless"
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


def _failed(message: str) -> int:
    print(f"headway-estimator: {message}", file=sys.stderr)
    return EXIT_FAILED
