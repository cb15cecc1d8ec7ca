"""What a planner counts."""

import functools
from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.planner.state import GrouperState, LeaderState
from solver.prediction.prompt_lengths import PromptLengths

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
MAX_LANES = 200
"""Lanes with a series of their own; the shallowest of more are summed."""
OTHER_LANES = "other"


class GrouperMetrics(Collector):
    """
    Prometheus series of the grouper role, read from its state when they are asked for.

    Args:
        registry: Where they are registered.
        state: The grouper's.
        lengths: What it learns of prompts.
    """

    def __init__(
        self, registry: CollectorRegistry, state: GrouperState, lengths: PromptLengths
    ) -> None:
        self._state = state
        self._lengths = lengths
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The state now."""
        state = self._state
        yield CounterMetricFamily(
            "headway_planner_requests_admitted", "Requests put into lanes", state.admitted
        )
        yield CounterMetricFamily(
            "headway_planner_requests_refused", "Requests answered with an error", state.refused
        )
        yield GaugeMetricFamily(
            "headway_planner_outstanding_tokens",
            "Tokens admitted by this grouper and not finished",
            state.shares.total,
        )
        bytes_per_token = GaugeMetricFamily(
            "headway_planner_prompt_bytes_per_token",
            "Of prompts that came as text, as learnt from what engines counted",
            labels=["model"],
        )
        for model, value in self._lengths.bytes_per_token().items():
            bytes_per_token.add_metric([model], value)
        yield bytes_per_token


class LeaderMetrics(Collector):
    """
    Prometheus series of the leader role.

    What describes the cluster is given by the active leader only: others do not know.

    Args:
        registry: Where they are registered.
        state: The leader's.
    """

    def __init__(self, registry: CollectorRegistry, state: LeaderState) -> None:
        self._state = state
        self._published_at = 0.0
        self.plans = Counter(
            "headway_planner_plans_published_total",
            "Plans published, one for each instance",
            registry=registry,
        )
        self.solve_s = Histogram(
            "headway_planner_plan_solve_seconds",
            "Time of the plan generator, for plans that were published",
            buckets=SECONDS,
            registry=registry,
        )
        registry.register(self)

    def counting(self, plan: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """*plan*, one planning round, with what it published counted."""

        @functools.wraps(plan)
        async def counted() -> None:
            await plan()
            self._count()

        return counted

    def _count(self) -> None:
        plans = tuple(self._state.plans.values())
        newest_at = max((plan.issued_at for plan in plans), default=0.0)
        if newest_at <= self._published_at:
            return
        self._published_at = newest_at
        published = [plan for plan in plans if plan.issued_at == newest_at]
        self.plans.inc(len(published))
        self.solve_s.observe(published[0].solve_s)

    def collect(self) -> Iterator[Metric]:
        """The state now."""
        state, active = self._state, self._state.active_since is not None
        yield GaugeMetricFamily(
            "headway_planner_leader_active", "1 while this process leads", int(active)
        )
        if not active:
            return
        yield GaugeMetricFamily("headway_planner_plan_epoch", "Newest epoch", state.epoch)
        yield GaugeMetricFamily(
            "headway_planner_instances", "Instances heard of lately", len(state.instances)
        )
        lanes = GaugeMetricFamily(
            "headway_planner_lane_requests",
            "Requests that wait in a lane or a companion, at the last count",
            labels=("lane",),
        )
        for lane, waiting in _bounded(state.waiting).items():
            lanes.add_metric((lane,), waiting)
        yield lanes


def _bounded(waiting: dict[str, int]) -> dict[str, int]:
    """The deepest queues by name, all further ones in one sum; empty ones are left out."""
    deepest = sorted(
        ((queue, ready) for queue, ready in waiting.items() if ready),
        key=lambda entry: (-entry[1], entry[0]),
    )
    bounded = dict(deepest[:MAX_LANES])
    if len(deepest) > MAX_LANES:
        bounded[OTHER_LANES] = sum(ready for _, ready in deepest[MAX_LANES:])
    return bounded
