"""
Headway's policy inside vLLM's engine against stock vLLM, on this machine's device.

Before Headway's policy runs, the bench sets targets and load. Targets are fixed multiples of the
times of unloaded stock vLLM. At the load, stock FCFS misses about half of the targets. Stock runs
with the chunk that misses least at this load, and its `priority` policy also with the best
priorities. Then the arms alternate under equal loads, in pairs. Each pair first searches for the
load again with stock FCFS, because a machine's speed drifts. A quick run omits the `priority`
policy.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ops.bench.engine_arms import FCFS, LARGEST_BUDGET, OURS, PRIORITY, Arm, engines
from ops.bench.engine_load import (
    CLASSES,
    Planned,
    Served,
    missed_share,
    planned_load,
    serve_alone,
)
from ops.bench.progress import say
from ops.bench.rate_search import RateSearch
from ops.bench.result import Line, Result
from services.agent.backends.base import EngineBackend
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from shared.contracts.base import Seconds
from shared.contracts.errors import SettingsError
from shared.contracts.qos import Slo

CHUNKS = (128, 256, 512, 1024)
BY_CLASS = {"Q1": 2, "Q2": 1, "Q3": 0}
ONLY_INTERACTIVE = {"Q1": 1, "Q2": 0, "Q3": 0}
MULTIPLES = {"ttft": 10.0, "tbt": 10.0, "Q2": 20.0, "Q3": 50.0}
"""Ratio of each target to the median of its time (TTFT, TBT or TTLT) on the unloaded engine."""
ABOUT_HALF = (0.5, 0.55)
"""
Range of the share of targets that stock FCFS misses at the load of a pair.

The range begins at 50 %: where stock FCFS missed 45 %, stock's `priority` missed 26 to 30 %, so
that even a policy without misses could hardly reach 1.3 times the goodput of `priority`.
"""
FIRST_UTILIZATION = 1.8
"""
Load at which the search for a load begins, as a multiple of the throughput of one request at a
time.
"""
_STEP = 1.2
"""
Factor between consecutive loads of the search, which ends when half of the requests are late.
"""
_TRIAL = 1000
"""
Number of the load in trials with stock vLLM; the number and the seed determine the load. Loads of
pairs are numbered from 0.
"""
LEAST_MISSED = 0.3
"""
Smallest acceptable share of targets missed by stock FCFS; at a lower share, the load cannot
distinguish policies.
"""
MAX_MISSED_RATIO = 0.5
MIN_GOODPUT_RATIO = 1.3


class Sizes:
    """Durations of the benchmark's measurements."""

    def __init__(self, *, quick: bool) -> None:
        self.alone = 8 if quick else 40
        self.load_s: Seconds = 4.0 if quick else 30.0
        self.pairs = 1 if quick else 5
        self.chunks = (256,) if quick else CHUNKS
        self.priorities: tuple[Mapping[str, int], ...] = (
            () if quick else (BY_CLASS, ONLY_INTERACTIVE)
        )
        self.probes = 1 if quick else 5


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
    model: Path | None = None,
) -> Result:
    """Run the benchmark: set targets and load on stock vLLM, then compare."""
    reason = vllm_unavailable_reason()
    if reason is not None:
        raise SettingsError(reason)
    result = Result(name="engine", seed=seed, quick=quick)
    sizes = Sizes(quick=quick)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
        async with engines(Path(directory), given=model) as engine:
            await _compare(engine, result, sizes, seed)
    return result


async def _compare(engine: EngineBackend, result: Result, sizes: Sizes, seed: int) -> None:
    fcfs = Arm(model=FCFS, token_budget=256)
    ours = Arm(model=OURS, token_budget=LARGEST_BUDGET)
    slos, capacity_rps = await unloaded(engine, fcfs, sizes, seed, result)
    bench = Bench(engine, slos, sizes, seed)
    rate_rps = await bench.rate_with_half_missed(fcfs, FIRST_UTILIZATION * capacity_rps)
    fcfs = await bench.best([replace(fcfs, token_budget=chunk) for chunk in sizes.chunks], rate_rps)
    result.figures["stock fcfs: chunk"] = fcfs.token_budget
    arms = {"stock fcfs": fcfs, "ours": ours}
    if sizes.priorities:
        priority = await _best_priority(bench, sizes, rate_rps)
        result.figures["stock priority: chunk"] = priority.token_budget
        result.figures["stock priority: priorities"] = dict(priority.priorities)
        arms["stock priority"] = priority
    # Warm-up requests of Headway's engine are not measured; stock vLLM ran during calibration.
    await ours.activate(engine)
    await serve_alone(engine, OURS, planned_load(seed=seed + 3000, rate_rps=1.0, duration_s=10.0))
    rounds, rates_rps = [], []
    for number in range(sizes.pairs):
        rate_rps = await bench.rate_with_half_missed(fcfs, rate_rps, pair=number)
        rates_rps.append(rate_rps)
        rounds.append(await bench.round(arms, rate_rps, number))
    result.figures["load of the pairs, 1/s"] = rates_rps
    judge(result, rounds, sizes)


async def _best_priority(bench: "Bench", sizes: Sizes, rate_rps: float) -> Arm:
    """
    Stock vLLM's `priority` arm with the chunk, and then the priorities, that miss the fewest
    targets.
    """
    by_class = [
        Arm(model=PRIORITY, token_budget=chunk, priorities=sizes.priorities[0])
        for chunk in sizes.chunks
    ]
    chosen = await bench.best(by_class, rate_rps)
    with_others = [replace(chosen, priorities=priorities) for priorities in sizes.priorities]
    return await bench.best(with_others, rate_rps)


class Bench:
    """Runs loads on the arms of the benchmark, with fixed targets."""

    def __init__(
        self, engine: EngineBackend, slos: Mapping[str, Slo], sizes: Sizes, seed: int
    ) -> None:
        self._engine = engine
        self._slos = slos
        self._sizes = sizes
        self._seed = seed

    async def best(self, arms: Sequence[Arm], rate_rps: float) -> Arm:
        """
        The arm of *arms* with the fewest missed targets; each arm runs twice, because the machine's
        speed drifts.
        """
        if len(arms) == 1:
            return arms[0]
        load = self._load(_TRIAL, rate_rps)
        rounds = [[await self._probe(arm, load, rate_rps) for arm in arms] for _ in range(2)]
        shares = [sum(each) for each in zip(*rounds, strict=True)]
        return arms[shares.index(min(shares))]

    async def rate_with_half_missed(
        self, arm: Arm, rate_rps: float, *, pair: int | None = None
    ) -> float:
        """
        Request rate at which *arm* misses about half of the targets; *pair* is the number of the
        load.
        """
        return await self.rate_with_missed(ABOUT_HALF, arm, rate_rps, pair=pair)

    async def rate_with_missed(
        self, missed: tuple[float, float], arm: Arm, rate_rps: float, *, pair: int | None = None
    ) -> float:
        """
        Request rate at which *arm* misses a share within the range *missed*; *pair* is the number
        of the load.
        """
        search, wanted = RateSearch(first_rps=rate_rps, step=_STEP), sum(missed) / 2
        for _ in range(self._sizes.probes):
            rate_rps = search.next_rps(wanted)
            load = self._load(_TRIAL if pair is None else pair, rate_rps)
            share = search.missed[rate_rps] = await self._probe(arm, load, rate_rps)
            if missed[0] <= share <= missed[1]:
                return rate_rps
        return search.nearest_rps(wanted)

    async def round(
        self, arms: Mapping[str, Arm], rate_rps: float, number: int
    ) -> dict[str, list[Served]]:
        """Run all arms under one load, one after another; their order rotates from pair to pair."""
        load = self._load(number, rate_rps)
        names = list(arms)
        turn = number % len(names)
        served = {
            name: await self._serve(arms[name], load) for name in (*names[turn:], *names[:turn])
        }
        shares = ", ".join(f"{name} {missed_share(served[name]):.0%}" for name in names)
        say(f"pair {number + 1} of {self._sizes.pairs}, {rate_rps:.2f}/s, missed: {shares}")
        return served

    def _load(self, number: int, rate_rps: float) -> list[Planned]:
        return planned_load(
            seed=self._seed + number, rate_rps=rate_rps, duration_s=self._sizes.load_s
        )

    async def _probe(self, arm: Arm, load: list[Planned], rate_rps: float) -> float:
        """Share of the requests in *load* whose target *arm* misses."""
        share = missed_share(await self._serve(arm, load))
        say(f"{arm.model}, chunk {arm.token_budget}, {rate_rps:.2f}/s: {share:.0%} missed")
        return share

    async def _serve(self, arm: Arm, load: list[Planned]) -> list[Served]:
        patience_s = max(slo.ttlt_s or 0.0 for slo in self._slos.values())
        return await arm.serve(self._engine, load, self._slos, patience_s=patience_s)


async def unloaded(
    engine: EngineBackend, arm: Arm, sizes: Sizes, seed: int, result: Result
) -> tuple[dict[str, Slo], float]:
    """
    Targets from serving one request at a time on stock vLLM, and the throughput of this service in
    requests/s.
    """
    await arm.activate(engine)
    load = planned_load(seed=seed + 2000, rate_rps=1.0, duration_s=2 * sizes.alone)[: sizes.alone]
    warm, measured = load[: sizes.alone // 4], load[sizes.alone // 4 :]
    await serve_alone(engine, arm.model, warm)
    served = await serve_alone(engine, arm.model, measured)
    ttft_s = _median([(s.first_token_at or 0) - s.arrived_at for s in served])
    ttlt_s = _median([(s.last_token_at or 0) - s.arrived_at for s in served])
    tbt_s = _median(
        [
            ((s.last_token_at or 0) - (s.first_token_at or 0)) / (len(s.token_ids) - 1)
            for s in served
            if len(s.token_ids) > 1
        ]
    )
    result.figures["unloaded p50, ms"] = {
        "first token": 1000 * ttft_s, "gap": 1000 * tbt_s, "answer": 1000 * ttlt_s,
    }  # fmt: skip
    slos = {
        "Q1": Slo(ttft_s=MULTIPLES["ttft"] * ttft_s, tbt_s=MULTIPLES["tbt"] * tbt_s),
        "Q2": Slo(ttlt_s=MULTIPLES["Q2"] * ttlt_s),
        "Q3": Slo(ttlt_s=MULTIPLES["Q3"] * ttlt_s),
    }
    busy_s = sum((s.last_token_at or 0) - s.arrived_at for s in served)
    return slos, len(served) / busy_s


def judge(result: Result, rounds: Sequence[Mapping[str, list[Served]]], sizes: Sizes) -> None:
    """Add figures and acceptance lines; lines against stock vLLM only if all its policies ran."""
    missed = {name: [missed_share(each[name]) for each in rounds] for name in rounds[0]}
    kept = {
        name: [sum(not s.missed for s in each[name]) / sizes.load_s for each in rounds]
        for name in rounds[0]
    }
    for name in rounds[0]:
        result.figures[f"missed, {name}"] = _median(missed[name])
        result.figures[f"missed by pair, {name}"] = missed[name]
        result.figures[f"missed by class, {name}"] = {
            c: _median([missed_share([s for s in each[name] if s.planned.class_name == c])
                        for each in rounds])
            for c in CLASSES
        }  # fmt: skip
        result.figures[f"goodput, {name}, 1/s"] = _median(kept[name])
    # Without a run of `priority`, the better of stock's policies is unknown.
    is_conclusive = _median(missed["stock fcfs"]) >= LEAST_MISSED and "stock priority" in rounds[0]
    pairs = range(len(rounds)) if is_conclusive else range(0)
    stock = [name for name in rounds[0] if name != "ours"]
    result.lines = [
        Line(
            name="missed, ours / better of stock, median of pairs",
            value=_median_or_none(
                [missed["ours"][i] / max(1e-9, min(missed[s][i] for s in stock)) for i in pairs]
            ),
            bound=MAX_MISSED_RATIO,
        ),
        Line(
            name="goodput, better of stock / ours, median of pairs",
            value=_median_or_none(
                [max(kept[s][i] for s in stock) / kept["ours"][i] for i in pairs]
            ),
            bound=1 / MIN_GOODPUT_RATIO,
        ),
        Line(
            name="greedy answers of ours that differ from stock's",
            value=float(sum(_num_different(each["ours"], each["stock fcfs"]) for each in rounds)),
            bound=0.0,
        ),
    ]
    result.figures["answers compared"] = sum(
        a.finished and b.finished
        for each in rounds
        for a, b in zip(each["ours"], each["stock fcfs"], strict=True)
    )


def _num_different(ours: Sequence[Served], stock: Sequence[Served]) -> int:
    return sum(
        a.finished and b.finished and a.token_ids != b.token_ids
        for a, b in zip(ours, stock, strict=True)
    )


def _median_or_none(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
