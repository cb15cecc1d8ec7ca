"""Counters of a leader's plans since it started, and the predictions of its last plan."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.planner.leader.policies import Planned
from shared.contracts.base import InstanceId, Seconds, UnixTime
from shared.contracts.qos import QosClass
from solver.planning.problem.grouping import GroupId, RequestGroup
from solver.planning.review import Review

KEPT, UNREVIEWED = "kept", "unreviewed"
"""
Labels of planning rounds without a replan cause.

`KEPT`: the plan in force was kept. `UNREVIEWED`: the policy of the plan does not review plans.
"""
RELEGATED = "relegated"
"""Label of relegated requests, whose QoS class is not known, beside the QoS classes."""
_Places = Mapping[GroupId, tuple[InstanceId, int]]


@dataclass(slots=True)
class PlanRecord:
    """Counters of planning since the leader started, and predictions of its last plan."""

    rounds: Counter[str] = field(default_factory=Counter)
    """Number of planning rounds by replan cause."""
    rounds_s: Seconds = 0.0
    moved: int = 0
    """Number of request groups that replans moved to another instance."""
    made_at: UnixTime = 0.0
    """Time of the last replan."""
    late_share: dict[str, float] = field(default_factory=dict)
    """
    Expected share of waiting requests that will be late, by QoS class; `RELEGATED`: share of all
    waiting requests that were relegated.
    """
    alarmed: int = 0
    """
    Number of request groups whose probability of being in time is below the target confidence.
    """

    def take(
        self, planned: Planned, before: _Places, *, now: UnixTime, duration_s: Seconds
    ) -> None:
        """Count one planning round; *before* is the plan of the previous round."""
        review = planned.review
        cause = _cause(review)
        self.rounds[cause] += 1
        self.rounds_s += duration_s
        self.moved += sum(
            group in before and before[group][0] != instance
            for group, (instance, _) in planned.places.items()
        )
        if cause != KEPT:
            self.made_at = now
        self.late_share = {} if review is None else _late_share(planned, review.late_probability)
        self.alarmed = 0 if review is None else len(review.alarms)


def _cause(review: Review | None) -> str:
    if review is None:
        return UNREVIEWED
    return KEPT if review.cause is None else review.cause.value


def _late_share(planned: Planned, late: Mapping[GroupId, float]) -> dict[str, float]:
    waiting: dict[str, float] = defaultdict(float)
    expected: dict[str, float] = {each.value: 0.0 for each in QosClass}
    relegated = 0.0
    for group in planned.snapshot.groups:
        name = _class_of(group).value
        others = group.num_requests * (1 - group.relegated_share)
        relegated += group.num_requests - others
        waiting[name] += others
        expected[name] += others * late.get(group.group_id, 0.0)
    shares = {name: share / max(1.0, waiting[name]) for name, share in expected.items()}
    return shares | {RELEGATED: relegated / max(1.0, relegated + sum(waiting.values()))}


def _class_of(group: RequestGroup) -> QosClass:
    if group.interactive:
        return QosClass.INTERACTIVE
    return (
        QosClass.BEST_EFFORT if math.isinf(group.oldest_deadline_at) else QosClass.NON_INTERACTIVE
    )
