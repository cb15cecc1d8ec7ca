"""Cells of QUARTZ's benchmark, given the loads."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ops.bench.quartz_cells import PULL, LoadCell, RoutingCell
from ops.bench.store import Figures
from solver.routing.options import VARIANTS

SHIFTS = ("more-rag", "low-reuse", "large-budget")
CHANGED = ("bursty", *SHIFTS)
"""Mixes at which Headway must be better than FIFO-LL and a point prediction."""
FAIR = ("fifo-ll", "token-fair", "no-fairness", "quartz", "default")
JUDGED = ("fifo-ll", "point", "quartz", "default")
"""Policies that are simulated with every seed; other policies with the first seed only."""
MODES = (PULL, "locality-aware", "default")
"""Ways to assign requests: pulls by instances with room, longest prefix match, Headway's router."""
SHARED = ("quartz", "default")
"""Policies that are also simulated with several routers."""
ROUTERS = 3
HEAVIEST = 0.6
OVERLOAD = 1.25
"""
Load for the fairness lines, as a multiple of the judged load.

At the judged load, Jain's index is above 0.99 under every policy, because the order of service
matters to tenants only while capacity is scarce.
"""
SCALES = {"7B": 1.0, "14B": 2.0, "32B": 4.0}
"""Iteration time of each model of the paper, as a multiple of that of an 8B model."""
SWEEP = (0.6, 0.8, 1.0, 1.2)
"""Loads of the load sweep, as multiples of the judged load."""
LIGHT_LOAD = 0.4
"""Load of the slowdown, as a multiple of the judged load; instances keep up at double times."""

Loads = Mapping[LoadCell, Figures]


def searches(seeds: Sequence[int], *, quick: bool) -> list[LoadCell]:
    """Searches for the loads that the simulations need."""
    mixes = ("mixed",) if quick else ("mixed", *CHANGED)
    made = [LoadCell(mix=mix, seed=seed) for mix in mixes for seed in seeds]
    if not quick:
        made += [LoadCell(scale=scale, seed=seeds[0]) for scale in SCALES.values()]
    return list(dict.fromkeys(made))


def main(loads: Loads, seed: int, variant: str) -> RoutingCell:
    """Cell: the mixed workload at its judged load."""
    return changed(loads, "mixed", seed, variant)


def shared(loads: Loads, seed: int, variant: str) -> RoutingCell:
    """Cell: the mixed workload at its judged load, with several routers."""
    return replace(main(loads, seed, variant), routers=ROUTERS)


def changed(loads: Loads, mix: str, seed: int, variant: str) -> RoutingCell:
    """Cell: the workload mix *mix* at its judged load."""
    rate_rps = loads[LoadCell(mix=mix, seed=seed)]["rate_rps"]
    return RoutingCell(variant=variant, rate_rps=rate_rps, mix=mix, seed=seed)


def sized(loads: Loads, seed: int, variant: str, scale: float) -> RoutingCell:
    """Cell: the mixed workload on models of size *scale*, at the judged load of this size."""
    rate_rps = loads[LoadCell(scale=scale, seed=seed)]["rate_rps"]
    return RoutingCell(variant=variant, rate_rps=rate_rps, scale=scale, seed=seed)


def swept(loads: Loads, seed: int, variant: str, part: float) -> RoutingCell:
    """Cell: the mixed workload at the fraction *part* of its judged load."""
    cell = main(loads, seed, variant)
    return replace(cell, rate_rps=part * cell.rate_rps)


def heavy(loads: Loads, seed: int, variant: str) -> RoutingCell:
    """Cell: the mixed workload in overload; one tenant sends most requests."""
    cell = main(loads, seed, variant)
    return replace(cell, rate_rps=OVERLOAD * cell.rate_rps, heaviest=HEAVIEST)


def heavy_only(loads: Loads, seed: int, variant: str) -> RoutingCell:
    """Cell: the mixed workload at its judged load; one tenant sends most requests."""
    return replace(main(loads, seed, variant), heaviest=HEAVIEST)


def slowed(loads: Loads, seed: int) -> RoutingCell:
    """Cell: the mixed workload at a light load; iteration times double in the middle third."""
    cell = main(loads, seed, "quartz")
    return replace(cell, rate_rps=LIGHT_LOAD * cell.rate_rps, slowdown=2.0)


def cells(loads: Loads, seeds: Sequence[int], *, quick: bool) -> list[RoutingCell]:
    """All cells (simulations) of a quick or a full run of the benchmark."""
    if quick:
        judged = [main(loads, seed, name) for seed in seeds for name in ("fifo-ll", "quartz")]
        judged += [main(loads, seed, "default") for seed in seeds]
        return judged + [slowed(loads, seed) for seed in seeds]
    made = [main(loads, seed, name) for seed in seeds for name in JUDGED]
    made += [shared(loads, seed, name) for seed in seeds for name in SHARED]
    for seed in seeds:
        made += [changed(loads, mix, seed, name) for mix in CHANGED for name in JUDGED]
        made += [changed(loads, mix, seed, name) for mix in ("mixed", *CHANGED) for name in MODES]
        made += [heavy(loads, seed, name) for name in FAIR]
        made.append(slowed(loads, seed))
    first = seeds[0]
    for name in JUDGED:
        made += [sized(loads, first, name, scale) for scale in SCALES.values()]
        made += [swept(loads, first, name, part) for part in SWEEP]
    made += [main(loads, first, name) for name in VARIANTS]
    made += [heavy_only(loads, first, name) for name in FAIR]
    made += [changed(loads, mix, first, "no-calibration") for mix in CHANGED]
    return list(dict.fromkeys(made))


def mean(found: Mapping[RoutingCell, Figures], cells: Sequence[RoutingCell], *keys: str) -> float:
    """Mean of a figure over *cells*; *keys* are the path to the figure."""
    values = [_inner(found[cell], keys) for cell in cells]
    return float(sum(values) / len(values))


def _inner(figures: Any, keys: Sequence[str]) -> float:
    for key in keys:
        figures = figures[key]
    return float(figures)
