"""What `headway-estimator fit` says of one (model, engine, device)."""

from collections.abc import Iterator
from enum import Enum

import msgspec

from services.estimator.artefacts import HeldOut, LevelHeldOut
from services.estimator.keys import told
from services.estimator.tables import aligned
from shared.contracts.base import Seconds

_NONE = "-"


class Outcome(Enum):
    """What became of a fit."""

    WRITTEN = "written"
    DRY_RUN = "dry_run"
    WORSE = "worse"
    """Than the trees in force: not written."""
    TOO_FEW = "too_few"
    """Samples: not fitted."""


class FitReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of `--json`."""

    model: str
    engine: str
    device: str
    outcome: Outcome
    detail: str = ""
    """For people: what was done, or why not."""
    samples: int
    """To learn from and to judge by."""
    span_s: Seconds
    """From the first sample to the latest."""
    held_out: HeldOut | None = None
    in_force_version: int | None = None
    in_force_losses: tuple[tuple[float, float], ...] = ()
    """(Level, held-out pinball loss in s) of the trees in force."""
    relative_loss: float | None = None
    """Of the trees in force, in the mean over levels."""
    num_bytes: int | None = None
    fit_s: Seconds | None = None
    version: int | None = None
    """That was written."""
    file: str | None = None


def lines_of(report: FitReport) -> Iterator[str]:
    """A report as people read it."""
    key = told((report.model, report.engine, report.device))
    span = f"{report.samples} samples of {report.span_s / 3600:.1f} h"
    if (held_out := report.held_out) is None:
        yield f"{key}: {span}"
    else:
        learnt = report.samples - held_out.samples
        yield f"{key}: {span}, {learnt} to learn from, the latest {held_out.samples} to judge by"
        yield from (f"  {line}" for line in _table(report, held_out))
        yield f"  expected over measured time, all together: {held_out.mean_ratio:.3f}"
    yield f"  {report.detail}"


def _table(report: FitReport, held_out: HeldOut) -> Iterator[str]:
    theirs = dict(report.in_force_losses)
    version = report.in_force_version
    header = ["level", "loss ms", "a constant's ms", "within"]
    if version is not None:
        header.insert(2, f"v{version}'s ms")
    rows = [header]
    for each in held_out.levels:
        row = _row(each)
        if version is not None:
            row.insert(2, _ms(theirs.get(each.level)))
        rows.append(row)
    yield from aligned(rows)


def _row(each: LevelHeldOut) -> list[str]:
    within = f"{100 * each.coverage:.1f} %"
    return [f"p{100 * each.level:g}", _ms(each.loss_s), _ms(each.constant_loss_s), within]


def _ms(loss_s: float | None) -> str:
    return _NONE if loss_s is None else f"{1e3 * loss_s:.3f}"
