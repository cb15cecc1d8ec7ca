"""Figures and acceptance lines of `ops.bench doors_simulated`, from its rounds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ops.bench.doors_cells import HEAVY_LOADS, LIGHT_LOADS
from ops.bench.doors_fronts import OURS
from ops.bench.doors_report import (
    MOST_BATCH_RATIO,
    MOST_LATER_MS,
    MOST_MISSES_RATIO,
    MOST_POINTS,
    MOST_TWICE,
)
from ops.bench.doors_simulated_rounds import CLIENTS, Round
from ops.bench.result import Line, Result

Arms = Mapping[str, Sequence[Round]]
"""Arm -> its rounds, one for each seed, in the same order for all arms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One load of a cell."""

    cell: str
    load: str
    rate_rps: float


Measured = Mapping[Place, Arms]
Compare = Callable[[Round, Round], float | None]
"""Value of two rounds under one load, of Headway and of the best client; None without one."""


def best_client(arms: Arms) -> str:
    """The client with the fewest misses, and of equal ones with the earliest first tokens."""

    def rank(name: str) -> tuple[float, float]:
        rounds = arms[name]
        firsts = statistics.median(each.first_p50_s for each in rounds)
        return statistics.median(each.missed for each in rounds), firsts

    return min(CLIENTS, key=rank)


def report(result: Result, measured: Measured) -> None:
    """Add all figures and acceptance lines."""
    for place, arms in measured.items():
        at = f"{place.cell}, {place.load} ({place.rate_rps:.3g}/s)"
        best = best_client(arms)
        result.figures[f"{at}: best client"] = best
        result.figures[f"{at}: headway beside it"] = {
            name: _of_place(arms, compare) for name, compare in _COMPARED.items()
        }
        for name, rounds in arms.items():
            result.figures[f"{at}, {name}"] = _figures(rounds)
    result.lines += lines(measured)


def lines(measured: Measured) -> list[Line]:
    """The acceptance lines; of several cells, the worst counts."""
    made = []
    for loads, names in ((LIGHT_LOADS, _LIGHT), (HEAVY_LOADS, _HEAVY)):
        for load in loads:
            here = [arms for place, arms in measured.items() if place.load == load]
            for name, bound in names.items():
                values = [_of_place(arms, _COMPARED[name]) for arms in here]
                made.append(
                    Line(
                        name=f"{name}, where the best client misses {load}",
                        value=max((v for v in values if v is not None), default=None),
                        bound=bound,
                    )
                )
    ours = [each for arms in measured.values() for each in arms[OURS]]
    for name, counts, bound in (
        ("answers evicted", [float(each.evicted) for each in ours], 0.0),
        ("tokens computed twice", [each.twice for each in ours], MOST_TWICE),
        ("requests lost", [float(each.lost) for each in ours], 0.0),
    ):
        made.append(Line(name=f"{name}, headway", value=max(counts, default=None), bound=bound))
    return made


def _of_place(arms: Arms, compare: Compare) -> float | None:
    """Median over the seeds."""
    pairs = zip(arms[OURS], arms[best_client(arms)], strict=True)
    values = [compare(ours, other) for ours, other in pairs]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _missed_ratio(ours: Round, other: Round) -> float | None:
    return ours.missed / other.missed if other.missed else None


def _batch_ratio(ours: Round, other: Round) -> float | None:
    if ours.last_batch_s is None or not other.last_batch_s:
        return None
    return ours.last_batch_s / other.last_batch_s


_POINTS = "points of misses, headway - best client"
_LATER = "ms of the median first token, headway - best client"
_MISSES = "misses, headway / best client"
_LAST = "time of the last batch answer, headway / best client"
_COMPARED: Mapping[str, Compare] = {
    _POINTS: lambda ours, other: 100 * (ours.missed - other.missed),
    _LATER: lambda ours, other: 1e3 * (ours.first_p50_s - other.first_p50_s),
    _MISSES: _missed_ratio,
    _LAST: _batch_ratio,
}
_LIGHT = {_POINTS: MOST_POINTS, _LATER: MOST_LATER_MS}
_HEAVY = {_MISSES: MOST_MISSES_RATIO, _LAST: MOST_BATCH_RATIO}


def _figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over the seeds."""
    figures: dict[str, Any] = {}
    for name in rounds[0].classes:
        every = [each.classes[name] for each in rounds if name in each.classes]
        figures[name] = {
            "missed %": round(100 * statistics.median(each.missed for each in every), 1),
            "first p50 s": round(statistics.median(each.first_p50_s for each in every), 3),
            "first p99 s": round(statistics.median(each.first_p99_s for each in every), 3),
        }
    ends = [each.last_batch_s for each in rounds if each.last_batch_s is not None]
    return figures | {
        "missed % of each seed": [round(100 * each.missed, 1) for each in rounds],
        "last batch s": round(statistics.median(ends), 1) if ends else None,
    }
