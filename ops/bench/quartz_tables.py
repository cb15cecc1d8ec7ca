"""Tables 4 to 8 of QUARTZ: Headway and the baselines, and the paper's values."""

from collections.abc import Mapping, Sequence
from typing import Any

from ops.bench import quartz_plan as plan
from ops.bench.quartz_cells import RoutingCell
from ops.bench.store import Figures
from solver.routing.options import VARIANTS

PAPER = {
    "4": "P95 / P99 ms, missed %. 7B: FIFO-LL 2374/3641 18.8, point 2116/3067 14.6, QUARTZ "
    "1869/2738 11.9. 14B: 2861/4547 26.4, 2418/3698 19.7, 2137/3216 15.8. 32B: 4038/6516 35.1, "
    "3394/5119 28.9, 2912/4446 22.1",
    "5": "14B, P99 ms, missed %, Jain: point 3698 19.7 0.931, routing-only 3576 18.4 0.938, "
    "queueing-only 3471 17.8 0.942, no-calibration 3294 16.5 0.946, no-fairness 3107 15.0 0.842, "
    "no-locality 3409 17.2 0.934, QUARTZ 3216 15.8 0.952",
    "6": "coverage at 0.95, raw -> calibrated: nominal 0.887 -> 0.944, more RAG 0.853 -> 0.925, "
    "low reuse 0.819 -> 0.909, large budget 0.838 -> 0.915; residual ms: -171 -> -39, -244 -> -61, "
    "-287 -> -71, -261 -> -68",
    "7": "met %, FIFO-LL, point, no calibration, QUARTZ: nominal 74.1 80.8 83.5 84.4, RAG 61.8 "
    "67.4 68.7 75.9, low reuse 58.7 64.3 65.7 73.1, large budget 56.1 62.6 63.4 69.8",
    "8": "Jain, longest wait s, long slowdown. Mixed: FIFO-LL 0.919 9.57 2.11, fair 0.944 8.08 "
    "1.66, QUARTZ 0.952 7.43 1.49. Bursty: FIFO-LL 0.907 11.24 2.43, no fairness 0.842 13.61 3.07, "
    "QUARTZ 0.946 8.73 1.58. The index is not defined there",
}  # fmt: skip
"""
The paper's values, measured at loads of 40, 28 and 18 closed-loop clients; the loads of this
benchmark are open.
"""

Found = Mapping[RoutingCell, Figures]


def tables(
    loads: plan.Loads, found: Found, seeds: Sequence[int], *, quick: bool
) -> dict[str, dict[str, Any]]:
    """A row for each table, workload and policy: means over the seeds, except the longest wait."""
    names = ("fifo-ll", "quartz", "default") if quick else plan.JUDGED
    made = {
        f"5, mixed: {name}": _row(found, [plan.main(loads, seed, name) for seed in seeds])
        for name in names
    }
    if not quick:
        made |= {
            f"5, mixed, one seed: {name}": _row(found, [plan.main(loads, seeds[0], name)])
            for name in VARIANTS
        }
    mixes = ("mixed",) if quick else ("mixed", *plan.SHIFTS)
    for mix in mixes:
        cells = [plan.changed(loads, mix, seed, "quartz") for seed in seeds]
        for level in ("0.9", "0.95"):
            made[f"6, {mix}, level {level}"] = {
                key: round(plan.mean(found, cells, "coverage", level, key), 3)
                for key in found[cells[0]]["coverage"][level]
            }
    if quick:
        return made
    made |= _scales_and_loads(loads, found, seeds[0])
    made |= _modes_and_routers(loads, found, seeds)
    for mix in plan.CHANGED:
        for name in plan.JUDGED:
            cells = [plan.changed(loads, mix, seed, name) for seed in seeds]
            made[f"7, {mix}: {name}"] = _row(found, cells)
        alone = plan.changed(loads, mix, seeds[0], "no-calibration")
        made[f"7, {mix}, one seed: no-calibration"] = _row(found, [alone])
    for name in plan.FAIR:
        cells = [plan.heavy(loads, seed, name) for seed in seeds]
        where = f"one tenant sends {plan.HEAVIEST:.0%}"
        made[f"8, {where} of {plan.OVERLOAD:g} times the load: {name}"] = _row(found, cells)
        alone = plan.heavy_only(loads, seeds[0], name)
        made[f"8, {where}, one seed: {name}"] = _row(found, [alone])
    return made


def _scales_and_loads(loads: plan.Loads, found: Found, seed: int) -> dict[str, dict[str, Any]]:
    made = {}
    for name in plan.JUDGED:
        for size, scale in plan.SCALES.items():
            cell = plan.sized(loads, seed, name, scale)
            made[f"4, mixed, {size}, one seed: {name}"] = _row(found, [cell])
        for part in plan.SWEEP:
            cell = plan.swept(loads, seed, name, part)
            made[f"mixed at {part:g} of its load, one seed: {name}"] = _row(found, [cell])
    return made


def _modes_and_routers(
    loads: plan.Loads, found: Found, seeds: Sequence[int]
) -> dict[str, dict[str, Any]]:
    made = {}
    for mix in ("mixed", *plan.CHANGED):
        for name in plan.MODES:
            cells = [plan.changed(loads, mix, seed, name) for seed in seeds]
            made[f"policy, {mix}: {name}"] = _latencies(found, cells)
    for name in plan.SHARED:
        for number, place in ((1, plan.main), (plan.ROUTERS, plan.shared)):
            cells = [place(loads, seed, name) for seed in seeds]
            made[f"routers, {number}: {name}"] = _latencies(found, cells)
    return made


def _latencies(found: Found, cells: Sequence[RoutingCell]) -> dict[str, Any]:
    return {
        "missed %": round(100 * plan.mean(found, cells, "violations"), 2),
        "P50 ms": round(1000 * plan.mean(found, cells, "p50_s")),
        "P99 ms": round(1000 * plan.mean(found, cells, "p99_s")),
        "wait s": round(max(found[cell]["max_wait_s"] for cell in cells), 1),
        "hits %": round(100 * plan.mean(found, cells, "hits"), 1),
    }


def _row(found: Found, cells: Sequence[RoutingCell]) -> dict[str, Any]:
    return {
        "P95 ms": round(1000 * plan.mean(found, cells, "p95_s")),
        "P99 ms": round(1000 * plan.mean(found, cells, "p99_s")),
        "missed %": round(100 * plan.mean(found, cells, "violations"), 2),
        "tok/s": round(plan.mean(found, cells, "throughput_tps")),
        "Jain": round(plan.mean(found, cells, "jain"), 3),
        "wait s": round(max(found[cell]["max_wait_s"] for cell in cells), 1),
        "long": round(plan.mean(found, cells, "long_slowdown"), 2),
    }
