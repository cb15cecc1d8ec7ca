"""What each view of the console shows at one time."""

from collections.abc import Callable, Mapping
from enum import Enum

import msgspec

from services.gateway.console.attainment import WINDOW_S, AttainmentRow
from services.gateway.console.watching import MeshWatch
from services.gateway.instances import SILENCE_S
from shared.contracts.base import InstanceId, ModelName, Seconds, UnixTime
from shared.contracts.plans import AdvisedInstances, PlacedGroup, PlanExplained
from shared.contracts.telemetry import InstanceStatus, LsoExecuted
from solver.prediction.time_distribution import TimeDistribution

MOST_GROUPS = 2000
NO_LEADER_S: Seconds = 10.0
"""Age of the leader's last answer from which the console says that there is none."""
_SHOWN = 0.9
"""Probability with which a turn begins within the shown interval."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="view"):
    """Content of one view."""

    at: UnixTime
    since: UnixTime | None
    """Time from which the gateway receives messages for the console; None: not yet."""
    command: str
    """Command that shows the same in a terminal, or changes it."""


class OverviewFrame(Frame, frozen=True, kw_only=True, tag="overview"):
    """Attainment by class and tenant, and totals of the instances."""

    window_s: Seconds
    rows: tuple[AttainmentRow, ...]
    instances: int
    silent: int
    running: int
    waiting: int
    """Number of requests in the windows of instances."""
    queued: int
    """Number of requests in the groups of the plan."""
    leader: str | None
    """Name of the leader; None if none answers."""
    late_share: float
    advice: tuple[AdvisedInstances, ...]


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A request group in a virtual queue; times in seconds from now."""

    instance_id: InstanceId | None
    """None while no instance can serve the group."""
    lane: str
    number: int
    requests: int
    turn_s: Seconds | None
    """Mean time until the group is served."""
    interval_s: tuple[Seconds, Seconds] | None
    """Interval that has the time with a probability of 90 %."""
    due_s: Seconds | None
    """Time left to the deadline of the group's oldest request; None for best effort."""
    late: float
    """Probability that the group is late."""


class QueuesFrame(Frame, frozen=True, kw_only=True, tag="queues"):
    """The plan in force: when each group has its turn."""

    epoch: int | None
    leader: str | None
    policy: str
    cause: str | None
    late_share: float
    age_s: Seconds | None
    """Age of the leader's answer."""
    bars: tuple[Bar, ...]
    more: int
    """Number of groups that are left out."""


class InstanceState(Enum):
    """State of an instance, as its last status shows it."""

    SERVING = "serving"
    ACTIVATING = "activating"
    DRAINING = "draining"
    IDLE = "without a model"
    SILENT = "silent"


class InstanceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One instance."""

    instance_id: InstanceId
    state: InstanceState
    seen_s: Seconds
    """Age of the last status."""
    engine: str
    device: str
    model: ModelName | None
    activating: ModelName | None
    running: int
    max_running: int
    window: int
    max_window: int
    swapped_out: int
    backlog_s: Seconds
    kv: float
    """Share of the KV memory that is used."""
    pace_s: Seconds | None
    """Mean duration of recent iterations; None until the instance reports some."""
    completed: int
    failed: int
    evicted: int
    relegated: int
    swaps: int
    crashes: int


class InstancesFrame(Frame, frozen=True, kw_only=True, tag="instances"):
    """All instances, and the last LLM serving operations."""

    rows: tuple[InstanceRow, ...]
    lsos: tuple[LsoExecuted, ...]
    """The newest first."""


def overview(watch: MeshWatch) -> OverviewFrame:
    """Present content of the overview."""
    now, plan = watch.clock.now(), _present_plan(watch)
    statuses = watch.present()
    lively = [status for at, status in statuses.values() if now - at < SILENCE_S]
    return OverviewFrame(
        at=now,
        since=watch.since,
        command="headway top",
        window_s=WINDOW_S,
        rows=watch.attainment.rows(now),
        instances=len(statuses),
        silent=len(statuses) - len(lively),
        running=sum(status.running for status in lively),
        waiting=sum(status.waiting for status in lively),
        queued=0 if plan is None else sum(group.num_requests for group in plan.groups),
        leader=None if plan is None else plan.leader_id,
        late_share=0.0 if plan is None else plan.late_share,
        advice=() if plan is None else plan.advice,
    )


def queues(watch: MeshWatch) -> QueuesFrame:
    """Present content of the timeline of virtual queues."""
    now, plan = watch.clock.now(), _present_plan(watch)
    groups = () if plan is None else plan.groups
    return QueuesFrame(
        at=now,
        since=watch.since,
        command="headway-planner plan show --gantt",
        epoch=None if plan is None else plan.epoch,
        leader=None if plan is None else plan.leader_id,
        policy="" if plan is None else plan.policy,
        cause=None if plan is None else plan.cause,
        late_share=0.0 if plan is None else plan.late_share,
        age_s=None if plan is None else now - watch.plan_at,
        bars=tuple(map(_bar, groups[:MOST_GROUPS])),
        more=max(0, len(groups) - MOST_GROUPS),
    )


def instances(watch: MeshWatch) -> InstancesFrame:
    """Present content of the view of instances."""
    now = watch.clock.now()
    return InstancesFrame(
        at=now,
        since=watch.since,
        command="headway-agent lso --help",
        rows=tuple(
            _row(status, now - at, watch.pace_s.get(name))
            for name, (at, status) in sorted(watch.present().items())
        ),
        lsos=tuple(reversed(watch.lsos)),
    )


FRAMES: Mapping[str, Callable[[MeshWatch], Frame]] = {
    "overview": overview,
    "queues": queues,
    "instances": instances,
}
"""View -> its present content."""


def _present_plan(watch: MeshWatch) -> PlanExplained | None:
    """The plan of the leader; None if it has not answered recently."""
    return watch.plan if watch.clock.now() - watch.plan_at < NO_LEADER_S else None


def _bar(group: PlacedGroup) -> Bar:
    interval_s = None
    if group.wait_s is not None and group.wait_sd_s is not None:
        wait = TimeDistribution.of(group.wait_s, group.wait_sd_s**2)
        low_s, high_s = wait.interval(_SHOWN)
        interval_s = (float(low_s), float(high_s))
    return Bar(
        instance_id=group.instance_id,
        lane=group.lane,
        number=group.number,
        requests=group.num_requests,
        turn_s=group.wait_s,
        interval_s=interval_s,
        due_s=group.time_left_s,
        late=group.late_probability,
    )


def _row(status: InstanceStatus, seen_s: Seconds, pace_s: Seconds | None) -> InstanceRow:
    totals = status.totals
    return InstanceRow(
        instance_id=status.instance_id,
        state=_state(status, seen_s),
        seen_s=seen_s,
        engine=status.engine,
        device=status.device,
        model=status.model,
        activating=status.activating,
        running=status.running,
        max_running=status.max_running,
        window=status.waiting,
        max_window=0 if status.pull is None else status.pull.max_requests,
        swapped_out=status.swapped_out,
        backlog_s=status.backlog_s,
        kv=status.kv_utilization,
        pace_s=pace_s,
        completed=totals.completed,
        failed=totals.failed,
        evicted=totals.evicted,
        relegated=totals.relegated,
        swaps=totals.swaps,
        crashes=totals.crashes,
    )


def _state(status: InstanceStatus, seen_s: Seconds) -> InstanceState:
    if seen_s >= SILENCE_S:
        return InstanceState.SILENT
    if status.draining:
        return InstanceState.DRAINING
    if status.activating is not None:
        return InstanceState.ACTIVATING
    return InstanceState.IDLE if status.model is None else InstanceState.SERVING
