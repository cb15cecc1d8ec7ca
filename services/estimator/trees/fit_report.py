"""Report of `headway-estimator fit` for one (model, engine, device)."""

from collections.abc import Iterator
from enum import Enum

import msgspec

from services.estimator.text_table import aligned
from services.estimator.trees.artefact_names import display_name
from services.estimator.trees.artefacts import HeldOut, LevelHeldOut
from shared.contracts.base import Seconds

_NONE = "-"


class Outcome(Enum):
    """Outcome of fitting the trees of one (model, engine, device)."""

    WRITTEN = "written"
    DRY_RUN = "dry_run"
    WORSE = "worse"
    """The fitted trees are worse than the trees in force, so the fitted trees were not written."""
    TOO_FEW = "too_few"
    """There were too few samples, so no trees were fitted."""


class FitReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of fitting the trees of one (model, engine, device); one output line with `--json`."""

    model: str
    engine: str
    device: str
    outcome: Outcome
    detail: str = ""
    """Text for operators: what the fit did, or why it did nothing."""
    samples: int
    """Number of training samples plus held-out samples."""
    span_s: Seconds
    """Time between the first and the last sample."""
    held_out: HeldOut | None = None
    in_force_version: int | None = None
    in_force_losses: tuple[tuple[float, float], ...] = ()
    """Pairs of level and held-out pinball loss in seconds of the trees in force."""
    relative_loss: float | None = None
    """
    Loss of the fitted trees as a multiple of the loss of the trees in force, averaged over levels.
    """
    num_bytes: int | None = None
    fit_s: Seconds | None = None
    version: int | None = None
    """Version under which the fitted trees were written."""
    file: str | None = None


def lines_of(report: FitReport) -> Iterator[str]:
    """Convert the fit report to text lines."""
    key = display_name((report.model, report.engine, report.device))
    span = f"{report.samples} samples of {report.span_s / 3600:.1f} h"
    if (held_out := report.held_out) is None:
        yield f"{key}: {span}"
    else:
        learnt = report.samples - held_out.samples
        yield f"{key}: {span}, {learnt} to learn from, the latest {held_out.samples} held out"
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
