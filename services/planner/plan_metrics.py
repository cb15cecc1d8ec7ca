"""What a leader counts of its plans."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.planner.explaining import advice_of
from services.planner.state import LeaderState


class PlanMetrics(Collector):
    """
    Prometheus series of the leader's plans, read from its state when they are asked for.

    What describes the plan in force is given by the active leader only.

    Args:
        registry: Where they are registered.
        state: The leader's.
    """

    def __init__(self, registry: CollectorRegistry, state: LeaderState) -> None:
        self._state = state
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The state now."""
        record = self._state.record
        rounds = CounterMetricFamily(
            "headway_planner_reviews",
            "Planning rounds, by what the plan was made anew for; kept ones and a baseline's, too",
            labels=("cause",),
        )
        for cause, count in sorted(record.rounds.items()):
            rounds.add_metric((cause,), count)
        yield rounds
        yield CounterMetricFamily(
            "headway_planner_review_seconds", "Time of all planning rounds", record.rounds_s
        )
        yield CounterMetricFamily(
            "headway_planner_groups_moved", "Groups that another instance got", record.moved
        )
        yield CounterMetricFamily(
            "headway_planner_alarms", "Alarms heard of the estimator", self._state.alarms_heard
        )
        yield CounterMetricFamily(
            "headway_planner_worker_restarts",
            "Times that the process of the plan generator was replaced",
            self._state.worker_restarts,
        )
        if self._state.leads:
            yield from self._plan_in_force()

    def _plan_in_force(self) -> Iterator[Metric]:
        record = self._state.record
        yield GaugeMetricFamily(
            "headway_planner_plan_made_timestamp_seconds",
            "When the plan was last made anew, Unix time",
            record.made_at,
        )
        yield GaugeMetricFamily(
            "headway_planner_groups_alarmed",
            "Groups whose chance to be in time is below the wanted confidence",
            record.alarmed,
        )
        late = GaugeMetricFamily(
            "headway_planner_late_ratio",
            "Expected share of waiting requests that will be late",
            labels=("qos_class",),
        )
        for name, share in sorted(record.late_share.items()):
            late.add_metric((name,), share)
        yield late
        advised = GaugeMetricFamily(
            "headway_planner_advised_instances",
            "Instances of a device that the load needs; those present when they are enough",
            labels=("device",),
        )
        for each in advice_of(self._state):
            advised.add_metric((each.device,), each.advised)
        yield advised
