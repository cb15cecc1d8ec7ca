"""
The bench of attached servers in virtual time: the loads, arms and lines of `attach`, without noise.

Speed and targets are those of `attach`'s model on one core, which both servers share. The published
latency model is too slow for short prompts and too fast for long ones, like the one that the
estimator fits there.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ops.bench.attach_report import Rounds, report
from ops.bench.attach_rounds import ORACLE, OURS, Round
from ops.bench.engine_load import planned_load
from ops.bench.rate_search import RateSearch
from ops.bench.result import Result
from ops.sim.attached.fronts import INTERACTIVE
from ops.sim.attached.outcomes import is_missed
from ops.sim.attached.rounds import Arrival, MakeFront, Served, Setup, client, mesh, serve
from shared.contracts.base import Seconds
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.qos import Slo

LATENCY = LatencyCoefficients(constant_s=6e-3, linear_s=8e-5, cross_s=1.5e-7, context_s=1.5e-7)
PUBLISHED = LatencyCoefficients(constant_s=8e-3, linear_s=2.2e-4, cross_s=8e-8, context_s=1e-6)
SLOS = {INTERACTIVE: Slo(ttft_s=0.9, tbt_s=0.08), "Q2": Slo(ttlt_s=10.0)}
SETUP = Setup(latency=LATENCY, slos=SLOS)
FRONTS: Mapping[str, MakeFront] = {
    "round robin": client(least_loaded=False, has_priorities=False),
    "round robin, priority": client(least_loaded=False, has_priorities=True),
    "least loaded": client(least_loaded=True, has_priorities=False),
    "least loaded, priority": client(least_loaded=True, has_priorities=True),
    OURS: mesh(PUBLISHED),
}
SEARCHED = "least loaded, priority"
"""Baseline with which the loads are found, and the arm of the oracle."""
MISSED = (0.3, 0.4, 0.5)
"""Shares of interactive targets that the baseline misses, which determine the loads."""
TOLERANCE = 0.02
DURATION_S: Seconds = 30.0
_PROBES = 10


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:  # noqa: ARG001 - as all benches
    """Run the benchmark; a quick run has four seeds instead of twelve."""
    result = Result(name="attach_simulated", seed=seed, quick=quick)
    seeds = range(seed, seed + (4 if quick else 12))
    search = RateSearch(first_rps=4.0)
    rounds: Rounds = {}
    for share in MISSED:
        rate_rps = _rate(search, share, seeds)
        result.figures[f"interactive and Q2 requests per s at {share:.0%}"] = round(rate_rps, 2)
        for number in seeds:
            load = arrivals(number, rate_rps)
            rounds[share, number] = {
                name: round_of(serve(front, load, DURATION_S, SETUP))
                for name, front in FRONTS.items()
            } | {ORACLE: _oracle(load)}
    report(result, rounds, (), MISSED)
    return result


def arrivals(seed: int, rate_rps: float) -> list[Arrival]:
    """The requests with targets of a load, half of them interactive."""
    planned = planned_load(seed=seed, rate_rps=1.5 * rate_rps, duration_s=DURATION_S)
    return [
        Arrival(each.at_s, each.class_name, len(each.prompt), each.output_tokens)
        for each in planned
        if each.class_name in SLOS
    ]


def round_of(served: Served) -> Round:
    """Misses and batch work of one front under one load."""
    return Round(
        late=_late(served, INTERACTIVE),
        late_q2=_late(served, "Q2"),
        batch_per_cpu_s=served.batch_tokens / max(1e-9, served.busy_s),
    )


def _late(served: Served, class_name: str) -> list[bool]:
    return [
        is_missed(each.outcome, each.slo)
        for each in served.requests
        if each.class_name == class_name
    ]


def _oracle(load: Sequence[Arrival]) -> Round:
    """The interactive requests alone on the servers."""
    alone = [each for each in load if each.class_name == INTERACTIVE]
    return round_of(serve(FRONTS[SEARCHED], alone, DURATION_S, replace(SETUP, num_batch=0)))


def _rate(search: RateSearch, share: float, seeds: Sequence[int]) -> float:
    """Rate at which the baseline misses *share* of the interactive targets, over all seeds."""
    for _ in range(_PROBES):
        rate_rps = search.next_rps(share)
        loads = [arrivals(each, rate_rps) for each in seeds]
        served = [serve(FRONTS[SEARCHED], load, DURATION_S, SETUP) for load in loads]
        missed = statistics.mean([round_of(each).missed for each in served])
        search.missed[rate_rps] = missed
        if abs(missed - share) <= TOLERANCE:
            break
    return search.nearest_rps(share)
