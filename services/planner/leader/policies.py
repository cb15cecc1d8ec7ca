"""Plan policies by name, and the planner that uses them."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from services.planner.leader.plan_worker import PlanWorker
from shared.contracts.base import InstanceId
from shared.contracts.plans import VirtualQueue
from solver.planning.capacity.advice import AdviceOptions, DeviceAdvice
from solver.planning.explanation import PlacedGroup
from solver.planning.orders.queues import OrderPolicy
from solver.planning.orders.rules import edf, edf_batching, fcfs
from solver.planning.problem.grouping import GroupId
from solver.planning.problem.problem import QueueOrder
from solver.planning.problem.snapshot import (
    ClusterSnapshot,
    places,
    planning_problem,
    virtual_queues,
)
from solver.planning.review import Basis, Review

GENERATOR = "qlm"
"""
Name of the plan generator's policy. The other policies are baselines, one of which is the fallback.
"""
FALLBACK = "edf-batching"
ORDER_POLICIES: dict[str, OrderPolicy] = {"edf": edf, FALLBACK: edf_batching, "fcfs": fcfs}
PLAN_POLICIES = (GENERATOR, *sorted(ORDER_POLICIES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Plan for a snapshot: its virtual queues and their review."""

    snapshot: ClusterSnapshot
    order: QueueOrder
    queues: tuple[VirtualQueue, ...]
    places: Mapping[GroupId, tuple[InstanceId, int]]
    policy: str
    review: Review | None = None
    """Review of the plan by the plan generator; None for baselines, which do not review plans."""


class Planner:
    """
    Makes plans with one policy.

    Args:
        policy: One of `PLAN_POLICIES`.
        importance_weight: Importance -> cost of one late request.
        worker: Process of the plan generator; while it fails or loads, the fallback policy makes
            the plans.
    """

    def __init__(
        self, policy: str, importance_weight: Mapping[str, float], worker: PlanWorker | None = None
    ) -> None:
        self._policy = policy
        self._importance_weight = importance_weight
        self._worker = worker
        self._basis: Basis | None = None

    async def plan(self, snapshot: ClusterSnapshot) -> Planned:
        """Virtual queues for *snapshot*, which has at least one instance."""
        if self._worker is not None:
            reviewed = await self._worker.review(snapshot, self._basis)
            if reviewed is not None:
                self._basis = reviewed.basis
                return _planned(snapshot, reviewed.order, GENERATOR, reviewed)
            self._basis = None
        name = self._policy if self._policy in ORDER_POLICIES else FALLBACK
        order = await asyncio.to_thread(self._ordered, name, snapshot)
        return _planned(snapshot, order, name, None)

    def _ordered(self, name: str, snapshot: ClusterSnapshot) -> QueueOrder:
        problem = planning_problem(snapshot, importance_weight=self._importance_weight)
        return ORDER_POLICIES[name](problem)

    @property
    def worker_restarts(self) -> int:
        """Number of times that the worker process was replaced."""
        return 0 if self._worker is None else self._worker.restarts

    async def advise(
        self, snapshot: ClusterSnapshot, options: AdviceOptions, floors: Mapping[str, int]
    ) -> tuple[DeviceAdvice, ...]:
        """
        Numbers of instances for the waiting work, as `scale_advice` computes them; empty while the
        worker process is unavailable.
        """
        if self._worker is None:
            return ()
        return await self._worker.advise(snapshot, options, floors)

    async def explain(self, planned: Planned, *, most: int) -> tuple[PlacedGroup, ...]:
        """
        Explain the groups of the plan, the first *most* with alternative places; empty if the
        worker fails.
        """
        if self._worker is None:
            return ()
        return await self._worker.explain(planned.snapshot, planned.order, most=most)


def _planned(
    snapshot: ClusterSnapshot, order: QueueOrder, policy: str, reviewed: Review | None
) -> Planned:
    return Planned(
        snapshot=snapshot,
        order=order,
        queues=virtual_queues(snapshot, order),
        places=places(snapshot, order),
        policy=policy,
        review=reviewed,
    )


def shape_of(queue: VirtualQueue) -> tuple[tuple[str, frozenset[str]], ...]:
    """Identity of a plan: the models in order, each with its lanes, without quotas."""
    return tuple(
        (segment.model, frozenset(quota.lane for quota in segment.lanes))
        for segment in queue.segments
    )
