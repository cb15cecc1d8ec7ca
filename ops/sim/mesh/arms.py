"""The compared systems, each with a planner and the LSOs of its instances (QLM §8)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ops.baselines.planning.atcs import atcs
from ops.baselines.planning.spreading import round_robin
from ops.sim.mesh.cluster import PlannerFactory
from ops.sim.mesh.conduct import (
    STOCK_RULES,
    Conduct,
    PullKey,
    by_arrival,
    by_deadline,
    by_deadline_and_work,
)
from ops.sim.mesh.lanes import MeshLanes
from ops.sim.mesh.planners import (
    IMPORTANCE_WEIGHT,
    GeneratorPlanner,
    Grouping,
    OrderPlanner,
    Profiles,
    chance_policy,
    shepherd_policy,
)
from ops.sim.mesh.snapshot import grouped, one_by_one
from shared.contracts.base import UnixTime
from solver.planning.lso.actions import keep_warm
from solver.planning.orders.queues import OrderPolicy
from solver.planning.orders.rules import edf, edf_batching, fcfs
from solver.planning.problem.grouping import RequestGroup
from solver.planning.review import ReviewOptions

HORIZON = 192
"""Number of requests that a policy without request groups considers in one plan."""
STATIC_BATCH = 64
"""
Number of requests in a SHEPHERD batch: half of the maximum, because answer lengths are unknown.
"""
SHEPHERD_PLANS = 60
"""Number of plans that SHEPHERD makes before it partitions the models again."""
MOVES_PER_S = 40_000.0
"""Moves per second of the simulated leader's search; a real leader makes several times more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One of the compared systems: its planner and the conduct of its instances."""

    conduct: Conduct
    planner: Callable[[int, float], PlannerFactory]
    """(Seed, QLM's delta) -> function that creates the planner."""


def _groups(batch_multiple: float) -> Grouping:
    def grouping(lanes: MeshLanes, profiles: Profiles, now: UnixTime) -> tuple[RequestGroup, ...]:
        return grouped(lanes, profiles, batch_multiple=batch_multiple, now=now)

    return grouping


def _singles(key: PullKey, count: int) -> Grouping:
    def grouping(lanes: MeshLanes, _: Profiles, __: UnixTime) -> tuple[RequestGroup, ...]:
        return one_by_one(lanes, key, count=count)

    return grouping


def _generator(seed: int, batch_multiple: float) -> PlannerFactory:
    options = ReviewOptions(importance_weight=IMPORTANCE_WEIGHT)
    return lambda profiles: GeneratorPlanner(
        profiles, _groups(batch_multiple), moves_per_s=MOVES_PER_S, options=options, seed=seed
    )


def _rule(policy: Callable[[int], OrderPolicy]) -> Callable[[int, float], PlannerFactory]:
    """System whose planner orders request groups by a rule."""
    return lambda seed, batch_multiple: (
        lambda profiles: OrderPlanner(profiles, _groups(batch_multiple), policy(seed))
    )


def _by_request(
    key: PullKey, policy: OrderPolicy, count: int = HORIZON
) -> Callable[[int, float], PlannerFactory]:
    """System whose planner orders the first *count* requests by a rule."""
    return lambda _seed, _multiple: (
        lambda profiles: OrderPlanner(profiles, _singles(key, count), policy)
    )


def _edf_ahead(window: int) -> Arm:
    """System with EDF whose instances pull into a window of *window* requests."""
    return Arm(
        conduct=replace(_EDF, window=window), planner=_by_request(by_deadline, edf, 8 * window)
    )


_OURS = Conduct(key=by_deadline_and_work)
_BATCHING = Conduct()
_APART = replace(_BATCHING, shares=False)
_STOCK = Conduct(
    key=by_arrival, rules=STOCK_RULES, looks_ahead=True, relegates=False, host_kv_bytes=0
)
_EDF = replace(_STOCK, key=by_deadline)
_STATIC = Conduct(
    window=STATIC_BATCH,
    rules=STOCK_RULES,
    shares=False,
    relegates=False,
    host_kv_bytes=0,
    static_batch=STATIC_BATCH,
)

BASELINES: dict[str, Arm] = {
    "fcfs": Arm(conduct=_STOCK, planner=_by_request(by_arrival, fcfs)),
    "edf": Arm(conduct=_EDF, planner=_by_request(by_deadline, edf)),
    "edf-batching": Arm(conduct=_BATCHING, planner=_rule(lambda _: edf_batching)),
    "atcs": Arm(conduct=_BATCHING, planner=_rule(lambda _: atcs)),
    "shepherd": Arm(conduct=_STATIC, planner=_rule(lambda _: shepherd_policy(SHEPHERD_PLANS))),
    "round-robin": Arm(conduct=_APART, planner=_rule(lambda _: round_robin)),
    "random": Arm(conduct=_APART, planner=_rule(chance_policy)),
}
ABLATIONS: dict[str, Arm] = {
    "no pulling": Arm(
        conduct=replace(_OURS, looks_ahead=True, gives_back=False, window=1 << 30),
        planner=_generator,
    ),
    "no eviction": Arm(conduct=replace(_OURS, rules=(*STOCK_RULES, keep_warm)), planner=_generator),
    "no state swap": Arm(conduct=replace(_OURS, host_kv_bytes=0), planner=_generator),
    "no warm start": Arm(conduct=replace(_OURS, warm_bytes=0), planner=_generator),
    "no load balancing": BASELINES["round-robin"],
    "no groups": Arm(
        conduct=replace(_OURS, looks_ahead=True), planner=_by_request(by_deadline, edf)
    ),
}
LOOK_AHEADS = {f"edf, {window} ahead": _edf_ahead(window) for window in (64, 256)}
ARMS: dict[str, Arm] = {
    "qlm": Arm(conduct=_OURS, planner=_generator),
    **BASELINES,
    **ABLATIONS,
    **LOOK_AHEADS,
}
