"""Prometheus metrics of a planner, by role."""

import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.planner.grouper.dead_letter_replies import DEAD_LETTER_REASONS
from services.planner.leader.plan_report import advice_of
from services.planner.routed.routing import Routing
from services.planner.state import GrouperState, LeaderState
from shared.contracts.qos import QosClass
from shared.contracts.telemetry import InstanceStatus, Residency
from shared.runtime.metrics import OTHER, Series, StateCollector, counter, gauge
from solver.prediction.lengths.prompt_lengths import PromptLengths

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
MAX_LANES = 200
"""
Maximum number of lanes with their own metric series; the lanes with the fewest messages share one
series.
"""
DEVICE = ("model", "engine", "device")


def grouper_metrics(
    registry: CollectorRegistry, state: GrouperState, lengths: PromptLengths
) -> None:
    """Register the metrics of the grouper role."""
    StateCollector(registry, lambda: state, GROUPER)
    StateCollector(registry, lambda: lengths, PROMPT_LENGTHS)


def routing_metrics(registry: CollectorRegistry, routing: Routing) -> None:
    """Register the metrics of a grouper's routers."""
    StateCollector(registry, lambda: routing, ROUTING)


class LeaderMetrics:
    """
    Metrics of the leader role.

    Only the active leader exports metrics of the cluster and of the plan in force.
    """

    def __init__(self, registry: CollectorRegistry, state: LeaderState) -> None:
        self._state = state
        self._published_at = 0.0
        self.plans = Counter(
            "headway_planner_plans_published_total",
            "Published plans, one for each instance",
            registry=registry,
        )
        self.solve_s = Histogram(
            "headway_planner_plan_solve_seconds",
            "Time that the plan generator took for a published plan",
            buckets=SECONDS,
            registry=registry,
        )
        StateCollector(registry, lambda: state, LEADER)
        StateCollector(registry, lambda: state, ACTIVE_LEADER, applies=lambda each: each.leads)

    def counting(self, plan: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """Wrap *plan*, which executes one planning round, to count the published plans."""

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


def _bounded(waiting: dict[str, int]) -> list[tuple[tuple[str], int]]:
    """
    One sample for each of the deepest queues, and one sample for the sum of the other non-empty
    queues.
    """
    deepest = sorted(
        ((queue, ready) for queue, ready in waiting.items() if ready),
        key=lambda entry: (-entry[1], entry[0]),
    )
    bounded = [((queue,), ready) for queue, ready in deepest[:MAX_LANES]]
    if len(deepest) > MAX_LANES:
        bounded.append(((OTHER,), sum(ready for _, ready in deepest[MAX_LANES:])))
    return bounded


def _longest(unserved_s: dict[str, float]) -> list[tuple[tuple[str], float]]:
    """
    One sample for each queue that has been unserved for the longest times, and the longest time of
    the other queues.
    """
    longest = sorted(unserved_s.items(), key=lambda entry: (-entry[1], entry[0]))
    bounded = [((queue,), time_s) for queue, time_s in longest[:MAX_LANES]]
    if len(longest) > MAX_LANES:
        bounded.append(((OTHER,), longest[MAX_LANES][1]))
    return bounded


def _swaps_s(instances: Mapping[str, InstanceStatus]) -> Iterator[tuple[str, float]]:
    """Shortest time to activate another model, for each instance that has one."""
    for name, status in sorted(instances.items()):
        others = [e.activate_s for e in status.models if e.residency is not Residency.ACTIVE]
        if others:
            yield name, min(others)


GROUPER: tuple[Series[GrouperState], ...] = (
    counter(
        "headway_planner_requests_admitted",
        "Requests published to lanes",
        lambda state: state.admitted,
    ),
    counter(
        "headway_planner_requests_refused",
        "Requests answered with an error",
        lambda state: state.refused,
    ),
    counter(
        "headway_planner_requests_held",
        "Requests put into delay queues, because they must not begin yet",
        lambda state: state.held,
    ),
    counter(
        "headway_planner_requests_expired",
        "Requests that this grouper ended at their ends, by the place where they waited",
        lambda state: (((place,), count) for place, count in sorted(state.expired.items())),
        "place",
    ),
    counter(
        "headway_planner_requests_limited",
        "Requests refused above a limit of their tenant",
        lambda state: state.limited,
    ),
    counter(
        "headway_planner_dead_letters",
        "Dead letters that this grouper has read, by error code or the broker's reason",
        lambda state: (((reason,), state.dead_letters[reason]) for reason in DEAD_LETTER_REASONS),
        "reason",
    ),
    counter(
        "headway_planner_request_slo_violated",
        "Admitted requests that this grouper ended without an answer; instances do not count them",
        lambda state: (((each.value,), state.violated[each.value]) for each in QosClass),
        "qos_class",
    ),
    counter(
        "headway_planner_tenant_slo_violated",
        "Admitted requests that this grouper ended without an answer, by tenant",
        lambda state: state.violated_by_tenant.samples(),
        "tenant",
        "qos_class",
    ),
    gauge(
        "headway_planner_outstanding_tokens",
        "Tokens of requests that this grouper admitted and that are not finished",
        lambda state: state.shares.total,
    ),
)
PROMPT_LENGTHS: tuple[Series[PromptLengths], ...] = (
    gauge(
        "headway_planner_prompt_bytes_per_token",
        "Bytes per token of text prompts, learnt from the engines' counts",
        lambda lengths: (((model,), value) for model, value in lengths.bytes_per_token().items()),
        "model",
    ),
)
ROUTING: tuple[Series[Routing], ...] = (
    counter(
        "headway_planner_requests_routed",
        "Requests routed to the inbox of an instance",
        lambda routing: routing.num_routed,
    ),
    counter(
        "headway_planner_requests_unrouted",
        "Requests in the scope of routing that went to lanes because they could not be routed",
        lambda routing: routing.num_left_to_lanes,
    ),
    gauge(
        "headway_planner_routing_waiting",
        "Requests that wait in the grouper until it can send them to an instance",
        lambda routing: routing.num_waiting,
    ),
    gauge(
        "headway_planner_routing_instances",
        "Instances to which requests are routed",
        lambda routing: (((each.model,), len(each.router.instances)) for each in routing.routers),
        "model",
    ),
    gauge(
        "headway_planner_routing_fallen_back",
        "1 while predictions are not trusted, and routing is first come, first served to the "
        "least loaded instance",
        lambda routing: (((each.model,), each.router.is_fallen_back) for each in routing.routers),
        "model",
    ),
    gauge(
        "headway_planner_prefill_coverage",
        "Share of recent prefills within their monitored quantile",
        lambda routing: (
            ((each.model, trust.engine, trust.device), trust.covered)
            for each in routing.routers
            for trust in each.trusts()
        ),
        *DEVICE,
    ),
    gauge(
        "headway_planner_prefill_residual_seconds",
        "Mean of predicted minus actual prefill times in seconds; negative if predicted too short",
        lambda routing: (
            ((each.model, trust.engine, trust.device), trust.residual_s)
            for each in routing.routers
            for trust in each.trusts()
        ),
        *DEVICE,
    ),
)
LEADER: tuple[Series[LeaderState], ...] = (
    gauge(
        "headway_planner_leader_active",
        "1 while this process is the active leader",
        lambda state: int(state.leads),
    ),
    counter(
        "headway_planner_reviews",
        "Planning rounds by outcome: replan cause, kept or unreviewed",
        lambda state: (((cause,), count) for cause, count in sorted(state.record.rounds.items())),
        "cause",
    ),
    counter(
        "headway_planner_review_seconds",
        "Total time of planning rounds",
        lambda state: state.record.rounds_s,
    ),
    counter(
        "headway_planner_groups_moved",
        "Groups that moved to another instance",
        lambda state: state.record.moved,
    ),
    counter(
        "headway_instance_idle_beside_work_seconds",
        "Time for which an instance with several models ran nothing although requests waited that "
        "it could serve",
        lambda state: (((name,), s) for name, s in sorted(state.idle.idle_s.items())),
        "instance",
    ),
    counter(
        "headway_instance_kept_seconds",
        "Time for which an instance ran nothing beside such requests, because it was kept for "
        "interactive requests of its active model",
        lambda state: (((name,), s) for name, s in sorted(state.idle.kept_s.items())),
        "instance",
    ),
    counter(
        "headway_planner_alarms",
        "Alarms received from the estimator",
        lambda state: state.alarms_heard,
    ),
    counter(
        "headway_planner_worker_restarts",
        "Restarts of the plan generator's process",
        lambda state: state.worker_restarts,
    ),
)
ACTIVE_LEADER: tuple[Series[LeaderState], ...] = (
    gauge("headway_planner_plan_epoch", "Highest known epoch of a plan", lambda state: state.epoch),
    gauge(
        "headway_planner_instances",
        "Instances with a recent status",
        lambda state: len(state.instances),
    ),
    gauge(
        "headway_instance_swap_seconds",
        "Shortest time to activate another model on an instance",
        lambda state: (((name,), s) for name, s in _swaps_s(state.instances)),
        "instance",
    ),
    gauge(
        "headway_planner_lane_requests",
        "Requests that wait in a lane or a companion queue, as known from reports and audits",
        lambda state: _bounded(state.waiting),
        "lane",
    ),
    gauge(
        "headway_planner_lane_unserved_seconds",
        "Time for which requests have waited in a lane or a companion queue and none has left it",
        lambda state: _longest(state.unserved_s),
        "lane",
    ),
    gauge(
        "headway_planner_lane_deadline_seconds",
        "Longest time to the deadlines of the requests in a lane with waiting requests, if bounded",
        lambda state: (
            (labels, state.deadline_s[labels[0]])
            for labels, _ in _longest(state.unserved_s)
            if labels[0] in state.deadline_s
        ),
        "lane",
    ),
    gauge(
        "headway_planner_work_queues",
        "Lanes and companion queues that exist",
        lambda state: len(state.counts.queues),
    ),
    counter(
        "headway_planner_queue_audits",
        "Audits, in which the leader counts queues at the broker to correct its own counts",
        lambda state: state.counts.audits,
    ),
    counter(
        "headway_planner_queue_drift_requests",
        "Sum of the absolute corrections by audits, in requests",
        lambda state: state.counts.drift,
    ),
    counter(
        "headway_planner_queues_retired",
        "Idle queues that were deleted",
        lambda state: state.counts.num_removed,
    ),
    gauge(
        "headway_planner_plan_made_timestamp_seconds",
        "Unix time of the last replan",
        lambda state: state.record.made_at,
    ),
    gauge(
        "headway_planner_groups_alarmed",
        "Groups whose probability to be in time is below the target confidence",
        lambda state: state.record.alarmed,
    ),
    gauge(
        "headway_planner_late_ratio",
        "Expected share of waiting requests that will be late; relegated: share of all waiting "
        "requests that were relegated, and are late",
        lambda state: (((name,), share) for name, share in sorted(state.record.late_share.items())),
        "qos_class",
    ),
    gauge(
        "headway_planner_advised_instances",
        "Advised number of instances of a device, also of one that has none now",
        lambda state: (((each.device,), each.advised) for each in advice_of(state)),
        "device",
    ),
)
