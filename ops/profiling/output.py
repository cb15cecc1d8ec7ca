"""Parts that the two forms of `headway profile` share: grid options, the report and its output."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ops.profiling import picture as profile_picture
from ops.profiling.fit import Cell, cells_of, errors_of, fitted
from ops.profiling.grid import Grid, Sample
from shared.contracts.base import ModelName, UnixTime, encode
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.estimates import Profile
from shared.runtime.cli import print_data

_DEFAULT = Grid()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a profile that `--json` prints."""

    file: str
    profile: Profile
    cells: list[Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The engine or device that was measured."""

    model: ModelName
    engine: str
    device: str
    kv_capacity_tokens: int | None = None
    """Number of tokens whose KV fits into memory; None if unknown."""


def check_output(options: argparse.Namespace) -> None:
    """
    Check that the requested files can be written, since measuring takes long.

    Raises:
        SettingsError: A file cannot be written; the message names the option.
    """
    if not options.out.parent.is_dir():
        raise SettingsError(f"--out: {options.out.parent} is not a directory")
    if options.plot is not None:
        profile_picture.check(options.plot)


def report_of(
    repeats: Sequence[Sequence[Sample]], subject: Subject, *, file: Path, now: UnixTime
) -> Report:
    """
    Report of the fit to all *repeats*; the errors are those of a fit to all but the last repeat, on
    the last repeat.

    Raises:
        EngineError: There are no samples.
    """
    samples = [each for repeat in repeats for each in repeat]
    if not samples:
        raise EngineError("the engine reported no iterations")
    latency, errors = fitted(samples), errors_of(repeats)
    found = Profile(
        model=subject.model,
        engine=subject.engine,
        device=subject.device,
        version=int(now * 1000),
        at=now,
        latency=latency,
        latency_error=errors.median if errors else None,
        latency_error_p95=errors.p95 if errors else None,
        latency_bias=errors.bias if errors else None,
        num_iterations=len(samples),
        token_rate_per_s=_rate(samples),
        kv_capacity_tokens=subject.kv_capacity_tokens,
    )
    return Report(file=str(file), profile=found, cells=cells_of(samples, latency))


def _rate(samples: Sequence[Sample]) -> float:
    """Throughput over all samples: computed tokens per second."""
    return sum(each.work.tokens for each in samples) / sum(each.duration_s for each in samples)


def write(report: Report, options: argparse.Namespace) -> None:
    """
    Write the file and the plot, and print the report as text or JSON.

    Raises:
        SettingsError: A file cannot be written.
    """
    try:
        options.out.write_bytes(encode(report.profile) + b"\n")
    except OSError as error:
        raise SettingsError(f"--out: cannot write {options.out}: {error}") from error
    if options.plot is not None:
        found = report.profile
        title = f"{found.model} on {found.engine}, {found.device}"
        profile_picture.draw(report.cells, options.plot, title=title)
    if options.json:
        print_data(report, as_json=True)
    else:
        _show(report)


def _show(report: Report) -> None:
    found, latency = report.profile, report.profile.latency
    print(f"{found.model} on {found.engine}, {found.device}: {found.num_iterations} iterations")
    if latency is not None:
        for name in latency.__struct_fields__:
            print(f"  {name:<12} {getattr(latency, name):.3g}")
    if found.latency_error is not None and found.latency_error_p95 is not None:
        print(
            "error on the last repeat, predicted from earlier repeats: median "
            f"{found.latency_error:.1%}, p95 {found.latency_error_p95:.1%}"
        )
    if found.kv_capacity_tokens is not None:
        print(f"KV memory for {found.kv_capacity_tokens} tokens")
    print(f"{report.file}: for headway simulate --profile")


def progress(text: str) -> None:
    """Print progress to standard error."""
    print(f"profile: {text}", file=sys.stderr, flush=True)


def grid_of(options: argparse.Namespace) -> Grid:
    """
    The grid that the options of `add_grid_options` specify.

    Raises:
        SettingsError: A value is invalid.
    """
    return Grid(
        chunks=options.chunks,
        contexts=options.contexts,
        batches=options.batches,
        repeats=options.repeats,
    )


def add_grid_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that specify the grid."""
    for name, unit in (
        ("chunks", "tokens of a prompt in one iteration"),
        ("contexts", "tokens of each decode's prompt"),
        ("batches", "decodes beside it; decodes and prompts alone are always measured"),
    ):
        add_numbers(parser, name, default=getattr(_DEFAULT, name), about=unit)
    parser.add_argument(
        "--repeats",
        type=int,
        default=_DEFAULT.repeats,
        metavar="N",
        help=("repeats of the whole grid, at least 2; the last one is used to measure the error"),
    )


def add_numbers(
    parser: argparse.ArgumentParser,
    name: str,
    *,
    default: tuple[int, ...],
    about: str,
    least: int = 1,
) -> None:
    """Add an option whose value is several integers."""
    parser.add_argument(
        f"--{name}",
        type=lambda text: _numbers(text, least),
        default=default,
        metavar="N,N,…",
        help=f"{about}; default {','.join(map(str, default))}",
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the output of a profile."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("profile.json"),
        metavar="FILE",
        help="profile file to write",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot to write, e.g. profile.png")
    parser.add_argument(
        "--json", action="store_true", help=("print the profile and all cells as one JSON line")
    )


def _numbers(text: str, least: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers N,N,…") from None
    if min(numbers) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: each value must be at least {least}")
    return numbers
