"""
Benchmark of the cost of late binding: goodput with bounded windows, compared with engines that see
all their requests.

Lanes, windows and pulls are simulated with the agents' code. The acceptance line is the least
share of full visibility's attainment and goodput that the default window must keep. At the
capacity load of nine replicas, the bench also prints the misses of pulling and of a round robin.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from ops.bench.progress import counted
from ops.bench.qoserve_cells import GPU_HOURS, GPU_RATE_RPS
from ops.bench.result import Line, Result
from ops.sim.profiles import load
from ops.sim.pulling import PullOptions
from ops.sim.scenario import Scenario
from ops.sim.summary import summarize

WINDOWS = (4, 8, 16, 32, 64, 128)
RATES_RPS = (4.0, 6.0)
"""Request rates per replica: close to its capacity, and 1.5 times this rate."""
LEAST_SHARE = 0.9
OTHER_SEEDS = (1, 2)
_GPUS = 9
_DURATION_S = 3600.0
"""
Duration of a run: twice the longest target. In a shorter run, overload delays requests without
misses.
"""

_Case = tuple[str, Scenario]


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
    workers: int | None = None,
) -> Result:
    """Run the benchmark: simulate with and without bounded windows, and compare."""
    result = Result(name="pulling", seed=seed, quick=quick)
    scales = (1,) if quick else (1, 4)
    found = dict(_measured(_cases(seed, scales, quick=quick), workers))
    for scale in (1, 4):
        for rate in RATES_RPS:
            _compare(result, found, f"{rate:g}/s on {scale}")
    for name in ("pull", "round robin"):
        key = f"{_GPUS} at {GPU_RATE_RPS:g}/s, {name}"
        if key in found:
            result.figures[f"missed, {key}, %"] = 100 * found[key]["violations"]
    return result


def _cases(seed: int, scales: Iterable[int], *, quick: bool) -> Iterator[_Case]:
    base = Scenario(
        profile=load("28"),
        policy="qoserve+curve",
        duration_s=_DURATION_S,
        seed=seed,
    )
    windows = (PullOptions().bounds.window,) if quick else WINDOWS
    if not quick:
        gpus = replace(base, replicas=_GPUS, rate_rps=GPU_RATE_RPS, duration_s=3600 * GPU_HOURS)
        yield f"{_GPUS} at {GPU_RATE_RPS:g}/s, pull", replace(gpus, pull=PullOptions())
        yield f"{_GPUS} at {GPU_RATE_RPS:g}/s, round robin", gpus
    for scale in scales:
        for rate in RATES_RPS:
            asked = replace(base, replicas=scale, rate_rps=rate * scale)
            yield f"{rate:g}/s on {scale}, full", asked
            for window in windows:
                pull = PullOptions().with_window(window)
                yield f"{rate:g}/s on {scale}, {window}", replace(asked, pull=pull)
            for other in () if quick else OTHER_SEEDS:
                again = replace(asked, seed=seed + other)
                yield f"{rate:g}/s on {scale}, full, seed +{other}", again
                pulled = replace(again, pull=PullOptions())
                yield f"{rate:g}/s on {scale}, default, seed +{other}", pulled


def _measured(cases: Iterable[_Case], workers: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    names, scenarios = zip(*cases, strict=True)
    with ProcessPoolExecutor(max_workers=workers) as pool:
        made = counted(pool.map(_figures, scenarios), len(names), "simulations")
        yield from zip(names, made, strict=True)


def _figures(scenario: Scenario) -> dict[str, Any]:
    return summarize(scenario.run())


def _compare(result: Result, found: dict[str, dict[str, Any]], where: str) -> None:
    """Add the figures of each window size, and the acceptance line of the default window."""
    full = found.get(f"{where}, full")
    default = PullOptions().bounds.window
    names = {"violations": "attainment", "goodput_rps": "goodput"}
    for figure, name in names.items():
        value = None
        if full is not None:
            curve = {
                str(window): _kept(found[key], figure) / _kept(full, figure)
                for window in WINDOWS
                if (key := f"{where}, {window}") in found
            }
            result.figures[f"{name} by window, share of full visibility's, {where}"] = curve
            others = [
                _kept(found[f"{where}, default, seed +{other}"], figure)
                / _kept(found[f"{where}, full, seed +{other}"], figure)
                for other in OTHER_SEEDS
                if f"{where}, full, seed +{other}" in found
            ]
            result.figures[f"{name} by seed, {where}"] = [curve[str(default)], *others]
            value = LEAST_SHARE / min([curve[str(default)], *others])
        line = f"0.9 of {name} in full / pulled, {where}, worst seed"
        result.lines.append(Line(name=line, value=value, bound=1.0))
    if full is not None:
        result.figures[f"kept in full visibility, {where}, %"] = 100 * (1 - full["violations"])


def _kept(figures: dict[str, Any], name: str) -> float:
    value = float(figures[name])
    return 1 - value if name == "violations" else value
