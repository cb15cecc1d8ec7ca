"""
Share of missed targets by number of work classes, if agents pull from lanes or engines see all
requests.

Three arms of four replicas serve the same arrivals. In the first arm, replicas pull from lanes of
the default layout. In the second arm, they pull from lanes of two work classes (divided at 2,048
tokens). In the third arm, a round robin assigns requests to engines that see all of their requests.
Loads are near or above the arms' capacity.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np

from ops.bench.progress import counted
from ops.bench.result import Line, Result
from ops.sim.profiles import load
from ops.sim.pulling import PullOptions
from ops.sim.scenario import Scenario
from ops.sim.summary import summarize
from shared.contracts.lanes import LaneLayout

TWO_CLASSES = LaneLayout(first_work_tokens=2047, num_work_classes=2)
ARMS: dict[str, PullOptions | None] = {
    "lanes": PullOptions(),
    "two classes": PullOptions(layout=TWO_CLASSES),
    "full view": None,
}
"""Arm of the benchmark -> how its replicas pull requests; None: a round robin assigns requests."""
MOST_MISSED: dict[tuple[str, float], float | None] = {
    ("code", 18.0): 0.1,
    ("code", 24.0): 8.5,
    ("code", 28.0): 14.0,
    ("conversation", 32.0): 15.5,
    ("sharegpt", 16.0): 31.5,
    ("long", 2.4): None,
    ("mixture", 14.0): None,
}
"""
(Mix, requests/s) -> maximum share of misses in %; None: at most the misses with two work classes.
"""
QUICK = (("code", 24.0),)
_REPLICAS = 4
_Key = tuple[str, float, str, int]
"""Key of a simulation: mix, requests/s, arm, seed."""


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
) -> Result:
    """Run the benchmark: simulate all arms and compare."""
    result = Result(name="lanes", seed=seed, quick=quick)
    seeds = [seed] if quick else [seed, seed + 1, seed + 2]
    keys = list(_keys(QUICK if quick else tuple(MOST_MISSED), seeds))
    hours = 0.1 if quick else 1.0
    with ProcessPoolExecutor() as pool:
        made = pool.map(_missed, keys, [hours] * len(keys))
        missed = dict(zip(keys, counted(made, len(keys), "simulations"), strict=True))
    for (mix, rate_rps), most in MOST_MISSED.items():
        by_arm = {
            arm: [missed[key] for each in seeds if (key := (mix, rate_rps, arm, each)) in missed]
            for arm in ARMS
        }
        where = f"{mix} {rate_rps:g}/s"
        for arm, values in by_arm.items():
            if values:
                result.figures[f"missed, {where}, {arm}, %"] = values
        ours, two = by_arm["lanes"], by_arm["two classes"]
        name = f"missed, {where} (two classes {np.mean(two):.1f}), %" if two else where
        bound = most if most is not None else float(np.mean(two)) if two else 0.0
        # A run of less than an hour does not reach the state in which the bounds hold.
        if quick and ours:
            result.lines.append(Line(name=name, value=ours[0], bound=two[0]))
        else:
            value = float(np.mean(ours)) if ours else None
            result.lines.append(Line(name=name, value=value, bound=bound))
    return result


def _keys(loads: tuple[tuple[str, float], ...], seeds: list[int]) -> Iterator[_Key]:
    for mix, rate_rps in loads:
        for seed in seeds:
            for arm in ARMS:
                yield mix, rate_rps, arm, seed


def _missed(key: _Key, hours: float) -> float:
    """Share of requests that missed their target, in %."""
    mix, rate_rps, arm, seed = key
    scenario = Scenario(
        profile=load("28"),
        replicas=_REPLICAS,
        rate_rps=rate_rps,
        duration_s=3600 * hours,
        lengths=mix,
        seed=seed,
    )
    return 100 * float(summarize(replace(scenario, pull=ARMS[arm]).run())["violations"])
