"""
Headway's policy inside vLLM without and with a reserve for errors of the latency model.

Targets are those of `ops.bench engine`. At the chosen load, the policy with the reserve misses a
considerable part of its targets; at lower loads the reserve hardly matters. The arms alternate in
pairs under equal loads, in an order that changes from pair to pair. The acceptance line uses the
upper end of the confidence interval, so that it fails with few or noisy pairs.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ops.bench.cores import OtherLoad
from ops.bench.engine import FIRST_UTILIZATION, Bench, Sizes, unloaded
from ops.bench.engine_arms import ENGINES, FCFS, LARGEST_BUDGET, Arm, engines
from ops.bench.engine_load import CLASSES, Served, missed_share, planned_load, serve_alone
from ops.bench.result import Line, Result, spread
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError

NONE, FIVE = "margin 0", "margin 0.05"
MOST_LOST_POINTS = 2.0
"""Most additional misses allowed without the margin, in percentage points of all requests."""
MISSED = (0.15, 0.3)
"""Range of the share of targets that the arm with the reserve misses at the chosen load."""
LEAST_MISSED = 5.0
"""Least misses of the worse arm, in %; with fewer misses, the load is too low to compare."""
_MODELS = {NONE: ModelName("margin-none"), FIVE: ModelName("margin-five")}
_SCHEDULERS = {NONE: "NoMargin", FIVE: "FivePercent"}

Rounds = Sequence[Mapping[str, list[Served]]]


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
) -> Result:
    """
    Determine the targets with stock FCFS, and the load with the arm that reserves time; then
    compare the arms.
    """
    reason = vllm_unavailable_reason()
    if reason is not None:
        raise SettingsError(reason)
    result = Result(name="engine_margins", seed=seed, quick=quick)
    sizes = Sizes(quick=quick)
    sizes.pairs = 2 if quick else 10
    models = {FCFS: ENGINES[FCFS]} | {
        _MODELS[name]: {"scheduler_cls": f"ops.bench.margin_schedulers.{_SCHEDULERS[name]}"}
        for name in _MODELS
    }
    arms = {name: Arm(model=_MODELS[name], token_budget=LARGEST_BUDGET) for name in _MODELS}
    fcfs = Arm(model=FCFS, token_budget=256)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
        async with engines(Path(directory), arms=models) as engine:
            slos, capacity_rps = await unloaded(engine, fcfs, sizes, seed, result)
            bench = Bench(engine, slos, sizes, seed)
            for arm in arms.values():  # warm-up of the latency model, not measured
                await arm.activate(engine)
                load = planned_load(seed=seed + 3000, rate_rps=1.0, duration_s=10.0)
                await serve_alone(engine, arm.model, load)
            rate_rps = await bench.rate_with_missed(
                MISSED, arms[FIVE], FIRST_UTILIZATION * capacity_rps
            )
            result.figures["load, 1/s"] = rate_rps
            others, began_at = OtherLoad(), time.time()
            rounds = [await bench.round(arms, rate_rps, number) for number in range(sizes.pairs)]
            others.sample()
            share = others.share(began_at, time.time())
            result.figures["CPU of other processes, %"] = round(100 * share)
    judge(result, rounds)
    return result


def judge(result: Result, rounds: Rounds) -> None:
    """Add the figures of each pair of runs, and the acceptance line."""
    missed = {name: [100 * missed_share(each[name]) for each in rounds] for name in rounds[0]}
    for name, values in missed.items():
        result.figures[f"missed, {name}, %"] = spread(values)
        result.figures[f"missed by pair, {name}, %"] = [round(value, 1) for value in values]
        result.figures[f"missed by class, {name}, %"] = {
            c: round(100 * missed_share(_of_class(rounds, name, c)), 1) for c in CLASSES
        }
    lost = [none - five for none, five in zip(missed[NONE], missed[FIVE], strict=True)]
    result.figures["missed more without a margin, points by pair"] = [round(x, 1) for x in lost]
    low, high = mean_interval(lost)
    result.figures["missed more without a margin, points"] = {
        "mean": float(np.mean(lost)), "median": float(np.median(lost)), "low": low, "high": high,
    }  # fmt: skip
    result.figures["requests of each arm"] = sum(len(each[NONE]) for each in rounds)
    is_conclusive = max(float(np.median(values)) for values in missed.values()) >= LEAST_MISSED
    result.lines.append(
        Line(
            name="missed more without a margin, points, mean of pairs, upper end of 95 %",
            value=high if is_conclusive else None,
            bound=MOST_LOST_POINTS,
        )
    )


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the mean of *values*, by the bootstrap."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (2000, len(values)))
    low, high = np.quantile(drawn.mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def _of_class(rounds: Rounds, name: str, class_name: str) -> list[Served]:
    """Requests of the class *class_name* that the arm *name* served, in all pairs of runs."""
    return [s for each in rounds for s in each[name] if s.planned.class_name == class_name]
