"""
The plan generator against a long search, the rules, exhaustive search, and OR-Tools.

Plans are judged by sampling (`ops/sim/plans.py`); all plans for one problem are judged in the same
scenarios. Points are percentage points of attainment. `expected` is the value of the generator's
own objective. Times are CPU time of one thread with compiled kernels. Acceptance lines use the
worst seed, except for points below the reference: they use the mean, because the reference is a
single search. Measurements are kept under `results/planner/` by code digest, so that an interrupted
full run (about a quarter of an hour on two idle cores) resumes.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench.planner_cells import (
    LARGE,
    MIDDLE,
    RULES,
    SMALL,
    TINY_BUDGET_S,
    Cell,
    Size,
    measure,
)
from ops.bench.progress import counted
from ops.bench.result import Line, Result
from ops.bench.store import Store, code_digest, kept
from solver.planning.search.loading import compile_kernels

Figures = Mapping[Cell, dict[str, Any]]

NUM_SEEDS, NUM_TINY, NUM_TINY_QUICK = 5, 100, 12
REFERENCE_S = 60.0
BUDGETS_S = (0.0, 0.15, 0.5, 1.0, 5.0)
"""Time budgets of searches for a plan; 0 gives the first plan."""
SIZES = (SMALL, MIDDLE, LARGE)
ROUTED = (Size(10, 2, 3), Size(20, 2, 3), Size(50, 4, 4))
FIRST_S = {MIDDLE: 0.15, LARGE: 0.10}
"""Time limit for making the first plan."""
POINTS = {
    SMALL: {1.0: 0.7},
    MIDDLE: {0.5: 2.0, 1.0: 1.5, 5.0: 0.5},
    LARGE: {1.0: 1.5, 5.0: 0.5},
}
"""
Largest allowed attainment below the reference search, in percentage points, by budget in seconds.
"""
BEATEN = {"edf-batching": 4.0, "edf": 40.0, "fcfs": 40.0}
"""Least advantage in attainment of a search of one second over each rule, in percentage points."""
MOST_HELD_MS = 10.0
_BASE_S = 5.0
"""Search budget of the plan that is in force before a replan."""


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
    workers: int | None = None,
) -> Result:
    """Run the benchmark: measure and compare."""
    result = Result(name="planner", seed=seed, quick=quick)
    code = code_digest(f"ops.bench.planner_{name}" for name in ("cells", "published", "loop"))
    store: Store[Cell] = Store(Path("results") / "planner", lambda _: code)
    wanted = quick_cells(seed) if quick else full_cells(seed)
    begun_s = time.monotonic()
    num_held = store.num_held(wanted)
    made = kept(wanted, store, measure, workers=workers, prepare=compile_kernels)
    found = dict(counted(made, len(wanted), "measurements"))
    report(result, found)
    result.figures["cost"] = {
        "measurements": len(found),
        "reused from earlier runs": num_held,
        "wall minutes of this run": (time.monotonic() - begun_s) / 60,
    }
    return result


def full_cells(seed: int) -> list[Cell]:
    """
    All cells in order of duration, the longest first, so that the two worker processes end
    together.
    """
    seeds = range(seed, seed + NUM_SEEDS)
    cells = [
        Cell(kind="search", size=size, seed=s, budget_s=REFERENCE_S)
        for size in reversed(SIZES)
        for s in seeds
    ]
    cells += [Cell(kind="rules", size=size, seed=s) for size in reversed(SIZES) for s in seeds]
    cells += [Cell(kind="replan", size=MIDDLE, seed=s, budget_s=_BASE_S) for s in seeds]
    cells += [
        Cell(kind="search", size=size, seed=s, budget_s=budget_s)
        for size in SIZES
        for budget_s in BUDGETS_S
        for s in seeds
    ]
    cells += [
        Cell(kind="routing", size=size, seed=s, budget_s=1.0) for size in ROUTED for s in seeds
    ]
    cells += [Cell(kind=kind, size=MIDDLE, seed=s) for kind in ("published", "loop") for s in seeds]
    return cells + [_tiny(s, 4 + s % 4) for s in range(seed, seed + NUM_TINY)]


def quick_cells(seed: int) -> list[Cell]:
    """Cells of one seed, without the long reference search."""
    cells = [Cell(kind="replan", size=MIDDLE, seed=seed, budget_s=1.0)]
    cells += [Cell(kind="rules", size=size, seed=seed) for size in SIZES]
    cells += [
        Cell(kind="search", size=size, seed=seed, budget_s=budget_s)
        for size in SIZES
        for budget_s in BUDGETS_S[:-1]
    ]
    cells += [Cell(kind="routing", size=ROUTED[-1], seed=seed, budget_s=1.0)]
    cells += [Cell(kind=kind, size=MIDDLE, seed=seed) for kind in ("published", "loop")]
    return cells + [_tiny(s, 4 + s % 2) for s in range(seed, seed + NUM_TINY_QUICK)]


def report(result: Result, found: Figures) -> None:
    """Add figures and acceptance lines for the measurements *found*."""
    for size in SIZES:
        _searches(result, found, size)
        _rules(result, found, size)
    _replans(result, found)
    _tinies(result, found)
    for size in ROUTED:
        _routings(result, found, size)
    _published(result, found)
    _loop(result, found)


def _tiny(seed: int, num_groups: int) -> Cell:
    return Cell(kind="tiny", size=Size(num_groups, 2, 3), seed=seed, budget_s=TINY_BUDGET_S)


def _searches(result: Result, found: Figures, size: Size) -> None:
    by_budget = {b: _of(found, "search", size, b) for b in (*BUDGETS_S, REFERENCE_S)}
    shown = {f"{budget_s:g} s": made for budget_s, made in by_budget.items() if made}
    for title, name, scale in (
        ("attainment, %", "attainment", 100),
        ("attainment expected, %", "expected", 100),
        ("interactive attainment, %", "interactive", 100),
        ("swaps", "swaps", 1),
        ("CPU seconds", "spent_s", 1),
    ):
        result.figures[f"{size} {title}"] = {
            budget: scale * _mean(made, name) for budget, made in shown.items()
        }
    result.figures[f"{size} moves/s"] = {
        budget: _mean(made, "moves") / _mean(made, "spent_s")
        for budget, made in shown.items()
        if _mean(made, "moves")
    }
    if size in FIRST_S:
        spent = [figures["spent_s"] for figures in by_budget[0.0]]
        result.lines.append(
            Line(
                name=f"{size}: CPU seconds of the first plan", value=_most(spent),
                bound=FIRST_S[size],
            )
        )  # fmt: skip
    reference = by_budget[REFERENCE_S]
    gaps = {b: _points(reference, made) for b, made in by_budget.items() if b < REFERENCE_S}
    if reference:
        result.figures[f"{size} points below {REFERENCE_S:g} s, mean (worst)"] = {
            f"{budget_s:g} s": f"{statistics.mean(gap):.2f} ({max(gap):.2f})"
            for budget_s, gap in gaps.items()
            if gap
        }
    for budget_s, most in POINTS[size].items():
        name = f"{size}: mean points below {REFERENCE_S:g} s at {budget_s:g} s"
        mean = statistics.mean(gaps[budget_s]) if gaps[budget_s] else None
        result.lines.append(Line(name=name, value=mean, bound=most))


def _rules(result: Result, found: Figures, size: Size) -> None:
    made = _of(found, "rules", size, 0.0)
    for title, name, scale in (
        ("attainment of rules, %", "attainment", 100),
        ("swaps of rules", "swaps", 1),
        ("CPU seconds of rules", "spent_s", 1),
    ):
        result.figures[f"{size} {title}"] = {
            rule: scale * _mean([figures[rule] for figures in made], name) for rule in RULES if made
        }
    ours = _of(found, "search", size, 1.0)
    for rule, least in BEATEN.items():
        over = _points([figures[rule] for figures in made], ours)
        name = f"{size}: points of {rule} over ours at 1 s"
        result.lines.append(Line(name=name, value=_most(over), bound=-least))


def _replans(result: Result, found: Figures) -> None:
    made = [figures for cell, figures in found.items() if cell.kind == "replan"]
    result.figures["replan, attainment, %"] = {
        "new": 100 * _mean(made, "attainment"),
        "kept": 100 * _mean(made, "keeping_attainment"),
    }
    result.figures["replan, CPU seconds"] = _mean(made, "spent_s")
    for title, name, most in (
        ("share of late groups moved", "moved_share", 0.02),
        ("cost over keeping", "over_keeping", 0.0),
        ("CPU seconds", "spent_s", 0.11),
    ):
        value = _most([figures[name] for figures in made])
        result.lines.append(Line(name=f"replan in 0.1 s: {title}", value=value, bound=most))


def _tinies(result: Result, found: Figures) -> None:
    made = [figures for cell, figures in found.items() if cell.kind == "tiny"]
    result.figures["tiny problems"] = {
        "number": len(made),
        "optimal": sum(figures["optimal"] for figures in made),
        "worst over the optimum": _most([figures["over_optimum"] for figures in made]),
        "surrogates proved": sum(figures["proved"] for figures in made),
        "worst true cost of those over the optimum": _most(
            [figures["program_over_optimum"] for figures in made]
        ),
    }
    for title, name, most in (
        ("share not optimal", "optimal", 0.05),
        ("share that CP-SAT does not prove", "proved", 0.0),
    ):
        value = 1 - _mean(made, name)
        result.lines.append(Line(name=f"tiny problems: {title}", value=value, bound=most))


def _routings(result: Result, found: Figures, size: Size) -> None:
    made = _of(found, "routing", size, 1.0)
    if made:
        ours = [figures["annealer"] for figures in made]
        theirs = [figures["routing"] for figures in made]
        result.figures[f"{size} OR-Tools' routing against ours in as much CPU time"] = {
            "CPU seconds": _mean(made, "spent_s"),
            "attainment, %": 100 * _mean(theirs, "attainment"),
            "ours": 100 * _mean(ours, "attainment"),
            "cost": _mean(theirs, "cost"),
            "our cost": _mean(ours, "cost"),
        }


def _published(result: Result, found: Figures) -> None:
    made = [figures for cell, figures in found.items() if cell.kind == "published"]
    for name in ("requests", "groups", "grouping_s", "planning_s", "counting_us", "memory_mb"):
        result.figures[f"published: {name}"] = _mean(made, name)
    lines: tuple[tuple[str, Callable[[dict[str, Any]], float], float], ...] = (
        ("800 / groups", lambda figures: 800 / figures["groups"], 1.0),
        ("requests not planned for", lambda figures: figures["requests"] - figures["waiting"], 0.0),
        (
            "CPU seconds of grouping and plan",
            lambda figures: figures["grouping_s"] + figures["planning_s"],
            1.5,
        ),
        ("MB of the process", lambda figures: figures["memory_mb"], 500.0),
    )
    for title, value_of, most in lines:
        value = _most([value_of(figures) for figures in made])
        result.lines.append(Line(name=f"400,000 requests: {title}", value=value, bound=most))


def _loop(result: Result, found: Figures) -> None:
    made = [figures for cell, figures in found.items() if cell.kind == "loop"]
    for name in ("planning_ms", "worst_ms", "idle_ms", "plan_s"):
        result.figures[f"event loop: {name}"] = _mean(made, name)
    held_ms = _most([figures["planning_ms"] for figures in made])
    name = "400,000 requests: ms that the event loop is held, median of rounds"
    result.lines.append(Line(name=name, value=held_ms, bound=MOST_HELD_MS))


def _of(found: Figures, kind: str, size: Size, budget_s: float) -> list[dict[str, Any]]:
    """Figures of the cells of one kind, size and budget, sorted by seed."""
    cells = [c for c in found if (c.kind, c.size, c.budget_s) == (kind, size, budget_s)]
    return [found[cell] for cell in sorted(cells, key=lambda cell: cell.seed)]


def _points(better: Sequence[dict[str, Any]], made: Sequence[dict[str, Any]]) -> list[float]:
    """
    Attainment of *better* minus attainment of *made* by seed, in percentage points; empty if seeds
    are missing.
    """
    if len(better) != len(made):
        return []
    pairs = zip(better, made, strict=True)
    return [100 * (high["attainment"] - low["attainment"]) for high, low in pairs]


def _mean(made: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.mean(float(figures[name]) for figures in made)


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)
