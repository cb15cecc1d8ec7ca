"""Who plans the simulated mesh: the generator, or a baseline with the same signature."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ops.sim.mesh.lanes import MeshLanes
from ops.sim.mesh.profiling import Measured
from ops.sim.mesh.snapshot import Places, snapshot_of
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.plans import VirtualQueue
from solver.planning.building import InstanceView, planning_problem, virtual_queues
from solver.planning.express import ExpressOptions, with_express
from solver.planning.grouping import RequestGroup
from solver.planning.order_baselines.queues import OrderPolicy
from solver.planning.order_baselines.shepherd import shepherd
from solver.planning.order_baselines.shepherd_partition import partition
from solver.planning.order_baselines.spreading import by_chance
from solver.planning.problem import PlanningProblem, QueueOrder
from solver.planning.review import Basis, ReviewOptions, review

Profiles = Mapping[tuple[str, ModelName], Measured]
Grouping = Callable[[MeshLanes, Profiles, UnixTime], tuple[RequestGroup, ...]]

TIER_WEIGHT = {"high": 4.0, "low": 1.0}
_MOVES_PER_CHECK = 500
"""Of the generator, between two looks at its clock."""


class MeshPlanner(Protocol):
    """Virtual queues for what waits now."""

    def plan(
        self, lanes: MeshLanes, instances: Sequence[InstanceView], now: UnixTime
    ) -> tuple[VirtualQueue, ...]:
        """For each of *instances*, in their order."""
        ...


class OrderPlanner:
    """
    A baseline: a rule that orders groups, anew each time.

    Args:
        profiles: Measured before.
        grouping: What the rule sees of the lanes.
        policy: The rule.
    """

    def __init__(self, profiles: Profiles, grouping: Grouping, policy: OrderPolicy) -> None:
        self._profiles = profiles
        self._grouping = grouping
        self._policy = policy

    def plan(
        self, lanes: MeshLanes, instances: Sequence[InstanceView], now: UnixTime
    ) -> tuple[VirtualQueue, ...]:
        groups = self._grouping(lanes, self._profiles, now)
        snapshot = snapshot_of(groups, instances, self._profiles, running={}, now=now)
        problem = planning_problem(snapshot, tier_weight=TIER_WEIGHT)
        return virtual_queues(snapshot, self._policy(problem))


class GeneratorPlanner:
    """
    The plan generator, as the leader runs it, with a fixed number of moves per group.

    Args:
        profiles: Measured before.
        grouping: The planner's.
        moves_per_s: What the machine of the simulated leader makes.
        options: Of the review.
        seed: Of the search.
    """

    def __init__(
        self,
        profiles: Profiles,
        grouping: Grouping,
        *,
        moves_per_s: float,
        options: ReviewOptions,
        seed: int,
    ) -> None:
        self._profiles = profiles
        self._grouping = grouping
        self._check_s = _MOVES_PER_CHECK / moves_per_s
        self._options = options
        self._seed = seed
        self._basis: Basis | None = None
        self._places: Places = {}

    def plan(
        self, lanes: MeshLanes, instances: Sequence[InstanceView], now: UnixTime
    ) -> tuple[VirtualQueue, ...]:
        groups = self._grouping(lanes, self._profiles, now)
        snapshot = with_express(
            snapshot_of(groups, instances, self._profiles, running=self._places, now=now),
            lanes.arrivals(),
            ExpressOptions(),
        )
        reviewed = review(
            snapshot,
            self._basis,
            options=self._options,
            clock=_Ticks(self._check_s),
            seed=self._seed,
        )
        self._seed += 1
        self._basis, self._places = reviewed.basis, reviewed.places(snapshot)
        return virtual_queues(snapshot, reviewed.order)


class _Ticks:
    """A clock by which each look at it takes the same time, so that plans are reproducible."""

    def __init__(self, tick_s: Seconds) -> None:
        self._tick_s = tick_s
        self._now = -tick_s

    def __call__(self) -> Seconds:
        self._now += self._tick_s
        return self._now


def shepherd_policy(period: int) -> OrderPolicy:
    """SHEPHERD, whose program partitions the models anew every *period* plans."""
    hosts: list[np.ndarray] = []
    left = 0

    def partitioned(problem: PlanningProblem) -> np.ndarray:
        nonlocal left
        if left == 0 or hosts[0].shape != problem.instances.activate_s.shape:
            hosts[:] = [partition(problem)]
            left = period
        left -= 1
        return _complete(hosts[0], problem)

    return lambda problem: shepherd(problem, partitioned=partitioned)


def _complete(hosts: np.ndarray, problem: PlanningProblem) -> np.ndarray:
    """*hosts*, and for a model that had no demand when they were found, whoever fits it."""
    homeless = ~hosts.any(axis=0)
    return np.asarray(hosts | (homeless & np.isfinite(problem.instances.activate_s)))


def chance_policy(seed: int) -> OrderPolicy:
    """Groups to instances by chance, anew each time."""
    random = np.random.default_rng(seed)

    def policy(problem: PlanningProblem) -> QueueOrder:
        return by_chance(problem, random)

    return policy
