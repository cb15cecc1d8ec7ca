"""Planners of the simulated mesh: the plan generator, and baselines with the same signature."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ops.baselines.planning.shepherd import shepherd
from ops.baselines.planning.shepherd_partition import partition
from ops.baselines.planning.spreading import by_chance
from ops.sim.mesh.lanes import MeshLanes
from ops.sim.mesh.profiling import Measured
from ops.sim.mesh.snapshot import Places, snapshot_of
from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from shared.contracts.plans import VirtualQueue
from solver.planning.orders.queues import OrderPolicy
from solver.planning.problem.grouping import RequestGroup
from solver.planning.problem.problem import PlanningProblem, QueueOrder
from solver.planning.problem.snapshot import InstanceView, planning_problem, virtual_queues
from solver.planning.reserved_capacity import ReservedCapacityOptions, with_reserved_capacity
from solver.planning.review import Basis, ReviewOptions, review

Profiles = Mapping[tuple[str, ModelName], Measured]
Grouping = Callable[[MeshLanes, Profiles, UnixTime], tuple[RequestGroup, ...]]

IMPORTANCE_WEIGHT = {"high": 4.0, "low": 1.0}
_MOVES_PER_CHECK = 500
"""Number of the generator's moves between two readings of its clock."""


class MeshPlanner(Protocol):
    """Makes virtual queues for the waiting requests."""

    kept: frozenset[InstanceId]
    """Instances that the last plan keeps for express requests."""

    def plan(
        self, lanes: MeshLanes, instances: Sequence[InstanceView], now: UnixTime
    ) -> tuple[VirtualQueue, ...]:
        """Make one virtual queue for each of *instances*, in the same order."""
        ...


class OrderPlanner:
    """
    A baseline that orders all groups by a rule for each plan. Models have no residency.

    Args:
        profiles: Service parameters by device and model, measured in advance.
        grouping: Function that makes groups of the lanes' requests.
        policy: Rule that orders the groups.
    """

    def __init__(self, profiles: Profiles, grouping: Grouping, policy: OrderPolicy) -> None:
        self._profiles = profiles
        self._grouping = grouping
        self._policy = policy
        self.kept: frozenset[InstanceId] = frozenset()

    def plan(
        self, lanes: MeshLanes, instances: Sequence[InstanceView], now: UnixTime
    ) -> tuple[VirtualQueue, ...]:
        groups = self._grouping(lanes, self._profiles, now)
        free = [replace(each, withheld=frozenset()) for each in instances]
        snapshot = snapshot_of(groups, free, self._profiles, running={}, now=now)
        problem = planning_problem(snapshot, importance_weight=IMPORTANCE_WEIGHT)
        return virtual_queues(snapshot, self._policy(problem))


class GeneratorPlanner:
    """
    The plan generator, as the leader runs it, with a fixed number of moves per group.

    Args:
        profiles: Service parameters by device and model, measured in advance.
        grouping: Function that makes groups of the lanes' requests.
        moves_per_s: The search's moves per second on the simulated leader's machine.
        options: Options of the review.
        seed: Seed of the search.
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
        self.kept: frozenset[InstanceId] = frozenset()

    def plan(
        self, lanes: MeshLanes, instances: Sequence[InstanceView], now: UnixTime
    ) -> tuple[VirtualQueue, ...]:
        groups = self._grouping(lanes, self._profiles, now)
        snapshot = with_reserved_capacity(
            snapshot_of(groups, instances, self._profiles, running=self._places, now=now),
            lanes.arrivals(),
            ReservedCapacityOptions(),
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
        self.kept = frozenset(each.instance_id for each in snapshot.instances if each.express_per_s)
        return virtual_queues(snapshot, reviewed.order)


class _Ticks:
    """Clock that advances by a constant with each reading, so that plans are reproducible."""

    def __init__(self, tick_s: Seconds) -> None:
        self._tick_s = tick_s
        self._now = -tick_s

    def __call__(self) -> Seconds:
        self._now += self._tick_s
        return self._now


def shepherd_policy(period: int) -> OrderPolicy:
    """Policy of SHEPHERD; its program partitions the models again after every *period* plans."""
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
    """
    Copy of the assignment *hosts*, with all fitting instances for each model that has no host.
    """
    homeless = ~hosts.any(axis=0)
    return np.asarray(hosts | (homeless & np.isfinite(problem.instances.activate_s)))


def chance_policy(seed: int) -> OrderPolicy:
    """A policy that puts groups on random instances, drawn again for each plan."""
    random = np.random.default_rng(seed)

    def policy(problem: PlanningProblem) -> QueueOrder:
        return by_chance(problem, random)

    return policy
