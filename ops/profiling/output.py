"""The report of a profile, and the options of its output."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cyclopts import Parameter

from ops.profiling import picture as profile_picture
from ops.profiling.fit import Cell, cells_of, errors_of, fitted
from ops.profiling.grid import Sample
from shared.contracts.base import ModelName, UnixTime, encode
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.estimates import Profile
from shared.runtime.cli import print_data
from shared.runtime.options import File


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


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where a report is written."""

    out: File = Path("profile.json")
    """Profile file to write."""
    plot: File | None = None
    """Plot to write, e.g. profile.png."""
    json: bool = False
    """Print the profile and all cells as one JSON line."""

    def check(self) -> None:
        """
        Check that the files can be written, since measuring takes long.

        Raises:
            SettingsError: A file cannot be written; the message names the option.
        """
        if not self.out.parent.is_dir():
            raise SettingsError(f"--out: {self.out.parent} is not a directory")
        if self.out.is_dir():
            raise SettingsError(f"--out: {self.out} is a directory")
        if self.plot is not None:
            profile_picture.check(self.plot)

    def write(self, report: Report) -> None:
        """
        Write the file and the plot, and print the report as text or JSON.

        Raises:
            SettingsError: A file cannot be written.
        """
        try:
            self.out.write_bytes(encode(report.profile) + b"\n")
        except OSError as error:
            raise SettingsError(f"--out: cannot write {self.out}: {error}") from error
        if self.plot is not None:
            found = report.profile
            title = f"{found.model} on {found.engine}, {found.device}"
            profile_picture.draw(report.cells, self.plot, title=title)
        if self.json:
            print_data(report, as_json=True)
        else:
            _show(report)


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
