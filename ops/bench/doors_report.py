"""Figures and acceptance lines of `ops.bench doors`, from its rounds."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ops.bench.doors_cells import (
    CELLS,
    HEAVY_LOADS,
    KILLED,
    LIGHT_LOADS,
    REAL,
    SATURATED,
    SEARCHED,
)
from ops.bench.doors_fronts import OURS
from ops.bench.doors_rounds import Round
from ops.bench.result import Line, Result

IN_TURN = "round robin"
COMPARED = (f"{IN_TURN}, priority", SEARCHED, "vllm-router power_of_two, priority")
"""Doors without which Headway's misses are compared with nothing: with fewer, it looks better."""
MOST_POINTS, MOST_LATER_MS, MOST_LATER_SHARE = 0.5, 20.0, 0.05
MOST_MISSES_RATIO, MOST_BATCH_RATIO = 0.8, 1.1
MOST_TWICE, MOST_ALL_DONE_RATIO = 0.01, 1 / 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One round, and what it measured."""

    cell: str
    load: str
    rate_rps: float
    seed: int
    scale: float
    door: str
    round: Round | None
    """None if the door is not installed, or did not start."""


@dataclass(frozen=True, slots=True)
class Runs:
    """All rounds."""

    every: Sequence[Run]

    @property
    def places(self) -> list[tuple[str, str]]:
        """Cell and load of all rounds, in their order."""
        return list(dict.fromkeys((run.cell, run.load) for run in self.every))

    def rounds(self, cell: str, load: str, door: str) -> dict[int, Round]:
        """Seed -> round of a door."""
        return {
            run.seed: run.round
            for run in self.every
            if (run.cell, run.load, run.door) == (cell, load, door) and run.round is not None
        }

    def doors(self, cell: str, load: str) -> list[str]:
        """Doors with a round."""
        names = dict.fromkeys(run.door for run in self.every)
        return [name for name in names if self.rounds(cell, load, name)]

    def missed(self, cell: str, load: str, door: str) -> float:
        """Share of missed first-token targets, in the mean over the seeds."""
        return statistics.fmean(e.missed for e in self.rounds(cell, load, door).values())

    def best_other(self, cell: str, load: str) -> str | None:
        """
        The door other than Headway with the fewest misses, and of equal ones with the earliest
        first tokens.
        """
        others = [door for door in self.doors(cell, load) if door != OURS]
        return min(others, key=lambda door: self._rank(cell, load, door), default=None)

    def compared(self, cell: str, load: str) -> str | None:
        """The best other door; None if Headway or a door of `COMPARED` was not measured."""
        if {OURS, *COMPARED} <= set(self.doors(cell, load)):
            return self.best_other(cell, load)
        return None

    def pairs(self, cell: str, load: str, other: str) -> list[tuple[Round, Round]]:
        """Rounds of Headway and of the other door with equal seeds."""
        ours, theirs = self.rounds(cell, load, OURS), self.rounds(cell, load, other)
        return [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]

    def _rank(self, cell: str, load: str, door: str) -> tuple[float, float]:
        firsts = [each.first_p50_s for each in self.rounds(cell, load, door).values()]
        known = [each for each in firsts if each is not None]
        return self.missed(cell, load, door), statistics.fmean(known) if known else float("inf")


Compare = Callable[[Round, Round], float | None]
"""Value of one pair of rounds, of Headway and of another door; None if it was not measured."""


def report(result: Result, runs: Runs) -> None:
    """Add all figures and acceptance lines."""
    for cell, load in runs.places:
        result.figures[f"{cell}, {load}: best other door"] = runs.best_other(cell, load)
        for door in dict.fromkeys(run.door for run in runs.every):
            asked = [e for e in runs.every if (e.cell, e.load, e.door) == (cell, load, door)]
            if asked:
                name = f"{cell}, {load} ({asked[0].rate_rps:.3g}/s), {door}"
                result.figures[name] = _figures(list(runs.rounds(cell, load, door).values()))
    result.figures["agents: points of prompt tokens cached, best other door - headway"] = _gap(runs)
    result.lines += lines(runs)


def lines(runs: Runs) -> list[Line]:
    """The acceptance lines; of several cells, the worst counts."""
    is_slow = any(run.scale != 1.0 for run in runs.every)
    made = []
    for load in LIGHT_LOADS:
        points = _worst(runs, load, lambda ours, other: 100 * (ours.missed - other.missed))
        later_ms = None if is_slow else _worst(runs, load, _later_ms)
        later_share = _worst(runs, load, _later_share) if is_slow else None
        at = f"where {SEARCHED} misses {load}"
        made += [
            Line(
                name=f"points of misses, headway - best other door, {at}",
                value=points,
                bound=MOST_POINTS,
            ),
            Line(
                name=f"ms of the median first token, headway - best other door, {at}",
                value=later_ms,
                bound=MOST_LATER_MS,
            ),
            Line(
                name=f"median first token, headway / best other door - 1, slow motion, {at}",
                value=later_share,
                bound=MOST_LATER_SHARE,
            ),
        ]
    compared = [name for name, cell in CELLS.items() if cell.compares_misses]
    for load in HEAVY_LOADS:
        at = f"where {SEARCHED} misses {load}"
        made += [
            Line(
                name=f"misses, headway / best other door, {at}",
                value=_worst(runs, load, _missed_ratio, cells=compared),
                bound=MOST_MISSES_RATIO,
            ),
            Line(
                name=f"time of the last batch answer, headway / best other door, {at}",
                value=_worst(runs, load, _batch_ratio),
                bound=MOST_BATCH_RATIO,
            ),
        ]
    ours = [run for run in runs.every if run.door == OURS and run.round is not None]
    # The words of a prompt are tokens only at simulated servers.
    unbroken = [
        run.round
        for run in ours
        if run.load != KILLED and CELLS[run.cell].kind != REAL and run.round is not None
    ]
    every = [run.round for run in ours if run.round is not None]
    return [
        *made,
        Line(
            name="time until all is done above capacity, headway / round robin",
            value=_worst(runs, SATURATED, _all_done_ratio, other=IN_TURN),
            bound=MOST_ALL_DONE_RATIO,
        ),
        Line(
            name="prompt tokens computed twice, headway",
            value=max((each.twice_prompt for each in unbroken), default=None),
            bound=MOST_TWICE,
        ),
        Line(
            name="answer tokens computed twice, headway",
            value=max((each.twice_answer for each in unbroken), default=None),
            bound=MOST_TWICE,
        ),
        Line(
            name="requests lost, headway",
            value=max((float(each.lost) for each in every), default=None),
            bound=0.0,
        ),
    ]


def _worst(
    runs: Runs,
    load: str,
    compare: Compare,
    *,
    cells: Iterable[str] = CELLS,
    other: str | None = None,
) -> float | None:
    """Largest over the cells of the median over the seeds; None if nothing was measured."""
    medians = []
    for cell in cells:
        beside = other or runs.compared(cell, load)
        if beside is None:
            continue
        values = [compare(ours, theirs) for ours, theirs in runs.pairs(cell, load, beside)]
        known = [value for value in values if value is not None]
        if known:
            medians.append(statistics.median(known))
    return max(medians, default=None)


def _later_ms(ours: Round, other: Round) -> float | None:
    if ours.first_p50_s is None or other.first_p50_s is None:
        return None
    return 1e3 * (ours.first_p50_s - other.first_p50_s)


def _later_share(ours: Round, other: Round) -> float | None:
    if ours.first_p50_s is None or not other.first_p50_s:
        return None
    return ours.first_p50_s / other.first_p50_s - 1.0


def _missed_ratio(ours: Round, other: Round) -> float | None:
    return ours.missed / other.missed if other.missed else None


def _batch_ratio(ours: Round, other: Round) -> float | None:
    if ours.last_batch_s is None or not other.last_batch_s:
        return None
    return ours.last_batch_s / other.last_batch_s


def _all_done_ratio(ours: Round, other: Round) -> float | None:
    return ours.all_done_s / other.all_done_s if other.all_done_s else None


def _gap(runs: Runs) -> dict[str, float] | None:
    """Load -> points by which Headway has fewer prompt tokens cached than the best other door."""
    gaps = {}
    for cell, load in runs.places:
        if not CELLS[cell].has_sessions or OURS not in runs.doors(cell, load):
            continue
        shares = {
            door: statistics.fmean(e.cached for e in runs.rounds(cell, load, door).values())
            for door in runs.doors(cell, load)
        }
        others = [share for door, share in shares.items() if door != OURS]
        if others:
            gaps[load] = round(100 * (max(others) - shares[OURS]), 1)
    return gaps or None


def _figures(rounds: Sequence[Round]) -> dict[str, Any] | None:
    """Means over the seeds; None if there are none."""
    if not rounds:
        return None
    figures: dict[str, Any] = {}
    for name in rounds[0].classes:
        every = [each.classes[name] for each in rounds if name in each.classes]
        figures[name] = {
            "in time %": _mean([100 * each.in_time for each in every], 1),
            "first p50 s": _mean([each.first_p50_s for each in every], 3),
            "first p99 s": _mean([each.first_p99_s for each in every], 3),
            "whole p50 s": _mean([each.whole_p50_s for each in every], 2),
        }
    return figures | {
        "missed % of each seed": [round(100 * each.missed, 1) for each in rounds],
        "lost": sum(each.lost for each in rounds),
        "errors": dict(sum((Counter(each.errors) for each in rounds), Counter())),
        "last batch s": _mean([each.last_batch_s for each in rounds], 1),
        "cached %": _mean([100 * each.cached for each in rounds], 1),
        "answer tokens/s": _mean([each.answer_tokens_per_s for each in rounds], 1),
        "twice, prompts %": _mean([100 * each.twice_prompt for each in rounds], 2),
        "twice, answers %": _mean([100 * each.twice_answer for each in rounds], 2),
        "spread": _mean([each.spread for each in rounds], 2),
        "door CPU ms per request": _mean([each.door_cpu_ms for each in rounds], 2),
        "RabbitMQ CPU ms per request": _mean([each.broker_cpu_ms for each in rounds], 2),
    }


def _mean(values: Sequence[float | None], digits: int) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), digits) if known else None
