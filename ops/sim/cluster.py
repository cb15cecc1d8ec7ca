"""Several replicas behind a round robin or shared lanes, and the outcome of every request."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ops.sim.engine import SimulatedReplica
from ops.sim.lanes import Forecast
from ops.sim.limits import EngineLimits, EngineTotals
from ops.sim.policies import PolicyFactory
from ops.sim.pulling import LateBoundReplica, PullingCluster, PullOptions
from ops.sim.request import Arrival, SimRequest
from shared.contracts.base import RequestId, Seconds, UnixTime
from solver.scheduling.engine.latency import LatencyTable

StopAt = Callable[[Sequence[SimRequest]], UnixTime | None]
"""
Function: requests -> time at which their simulation may end; None: when all requests are served.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one simulation."""

    requests: list[SimRequest]
    """Requests of the simulation in order of arrival."""
    totals: list[EngineTotals]
    """Counters of each replica."""
    end_s: Seconds
    """Simulated time at which the last replica ended."""
    simulated_s: Seconds
    """Simulated time, summed over all replicas."""
    cpu_s: Seconds
    """CPU time that this process used for the simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Replicas that share their requests."""

    num_replicas: int
    factory: PolicyFactory
    classes: frozenset[str] | None = None
    """
    Classes of requests that the replicas serve; None: all classes. Pools with classes form a silo
    deployment.
    """
    pull: PullOptions | None = None
    """
    Options of pulls from shared lanes; None: round robin, in which each engine sees all its
    requests.
    """


def simulate(
    arrivals: Sequence[Arrival],
    pools: Sequence[Pool],
    *,
    latency: LatencyTable,
    limits: EngineLimits,
    drain: bool = False,
) -> Outcome:
    """
    Serve *arrivals* by *pools*; the first pool that accepts a request's class serves it.

    Args:
        arrivals: Requests in order of time.
        pools: Pools of replicas; replicas of different pools do not influence each other.
        latency: Latency table of every replica.
        limits: Limits of every replica.
        drain: Serve all requests to their end. Otherwise a replica stops once the deadlines of
            all its requests have passed, because misses no longer change.

    Raises:
        ValueError: No pool accepts a class, or a request does not fit into an engine.
    """
    began = time.process_time()
    requests = [
        SimRequest(RequestId(str(number)), arrival) for number, arrival in enumerate(arrivals)
    ]
    stop_at = _never if drain else _last_deadline_at
    totals: list[EngineTotals] = []
    ends = [0.0]
    unassigned = requests
    for pool in pools:
        mine = [r for r in unassigned if _takes(pool, r)]
        unassigned = [r for r in unassigned if not _takes(pool, r)]
        _check_fit(mine, limits)
        serve = _round_robin if pool.pull is None else _pulling
        pool_totals, pool_ends = serve(mine, pool, latency, limits, stop_at)
        totals += pool_totals
        ends += pool_ends
    if unassigned:
        raise ValueError(f"no replicas for class {unassigned[0].arrival.class_name!r}")
    return Outcome(
        requests=requests,
        totals=totals,
        end_s=max(ends),
        simulated_s=sum(ends),
        cpu_s=time.process_time() - began,
    )


def _round_robin(
    requests: list[SimRequest],
    pool: Pool,
    latency: LatencyTable,
    limits: EngineLimits,
    stop_at: StopAt,
) -> tuple[list[EngineTotals], list[Seconds]]:
    """Simulate the replicas one by one, because they do not influence one another."""
    totals, ends = [], []
    for index in range(pool.num_replicas):
        shard = requests[index :: pool.num_replicas]
        replica = SimulatedReplica(pool.factory(latency), latency, limits)
        ends.append(replica.run(shard, until=stop_at(shard)))
        totals.append(replica.totals)
    return totals, ends


def _pulling(
    requests: list[SimRequest],
    pool: Pool,
    latency: LatencyTable,
    limits: EngineLimits,
    stop_at: StopAt,
) -> tuple[list[EngineTotals], list[Seconds]]:
    """Simulate all replicas of a pool together, because they pull from shared lanes."""
    assert pool.pull is not None
    replicas = [
        LateBoundReplica(pool.factory(latency), latency, limits) for _ in range(pool.num_replicas)
    ]
    cluster = PullingCluster(
        replicas, pool.pull, Forecast(requests, latency), max_running=limits.max_running
    )
    ends = cluster.run(requests, until=stop_at(requests))
    return [replica.totals for replica in replicas], ends


def _never(_requests: Sequence[SimRequest]) -> UnixTime | None:
    """Stop rule of a simulation that serves all requests to their end."""
    return None


def _last_deadline_at(requests: Sequence[SimRequest]) -> UnixTime | None:
    """Time of the last deadline of *requests*; None if no request has a deadline."""
    return max((r.deadline_at for r in requests if r.deadline_at != float("inf")), default=None)


def _takes(pool: Pool, request: SimRequest) -> bool:
    return pool.classes is None or request.arrival.class_name in pool.classes


def _check_fit(requests: Sequence[SimRequest], limits: EngineLimits) -> None:
    for request in requests:
        arrival = request.arrival
        needed = arrival.prompt_tokens + arrival.output_tokens + 2 * limits.block_tokens
        if needed > limits.kv_capacity_tokens:
            raise ValueError(
                f"a request needs {needed} KV tokens, the engine has {limits.kv_capacity_tokens}"
            )
