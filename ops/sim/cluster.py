"""Several replicas behind one round robin, and what came of every request."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits, EngineTotals
from ops.sim.policies import PolicyFactory
from ops.sim.request import Arrival, SimRequest
from shared.contracts.base import RequestId, Seconds
from solver.scheduling.latency import LatencyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One simulation."""

    requests: list[SimRequest]
    """In order of arrival."""
    totals: list[EngineTotals]
    """Of each replica."""
    end_s: Seconds
    """Simulated, until the last replica was done."""
    simulated_s: Seconds
    """Sum over replicas."""
    cpu_s: Seconds
    """Of this process, to compute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Replicas that share a round robin."""

    num_replicas: int
    factory: PolicyFactory
    classes: frozenset[str] | None = None
    """The traffic that they serve; none is all. Several such pools are a silo deployment."""


def simulate(
    arrivals: Sequence[Arrival],
    pools: Sequence[Pool],
    *,
    latency: LatencyTable,
    limits: EngineLimits,
    drain: bool = False,
) -> Outcome:
    """
    Serve *arrivals* by *pools*; each request by the first pool that takes its class.

    Args:
        arrivals: In order of time.
        pools: Replicas do not influence each other, since dispatch is round robin.
        latency: Of every replica.
        limits: Of every replica.
        drain: Serve everything to its end. Otherwise a replica stops once the deadlines of all
            its requests have passed, since nothing after that changes who missed one.

    Raises:
        ValueError: No pool takes a class, or a request does not fit into an engine.
    """
    began = time.process_time()
    requests = [
        SimRequest(RequestId(str(number)), arrival) for number, arrival in enumerate(arrivals)
    ]
    shards: list[tuple[Pool, list[SimRequest]]] = []
    unassigned = requests
    for pool in pools:
        mine = [r for r in unassigned if _takes(pool, r)]
        unassigned = [r for r in unassigned if not _takes(pool, r)]
        shards.extend((pool, mine[i :: pool.num_replicas]) for i in range(pool.num_replicas))
    if unassigned:
        raise ValueError(f"no replicas for class {unassigned[0].arrival.class_name!r}")
    totals = []
    ends = [0.0]
    for pool, shard in shards:
        _check_fit(shard, limits)
        replica = SimulatedReplica(pool.factory(latency), latency, limits)
        last_deadline_at = max(
            (r.deadline_at for r in shard if r.deadline_at != float("inf")), default=None
        )
        stop_at = None if drain else last_deadline_at
        ends.append(replica.run(shard, until=stop_at))
        totals.append(replica.totals)
    return Outcome(
        requests=requests,
        totals=totals,
        end_s=max(ends),
        simulated_s=sum(ends),
        cpu_s=time.process_time() - began,
    )


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
