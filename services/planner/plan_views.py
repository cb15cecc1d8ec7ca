"""
Views of the plan in force for operators: tables, differences, and a chart of service over time.
"""

from collections.abc import Mapping, Sequence

import msgspec

from shared.contracts.base import InstanceId, Seconds
from shared.contracts.plans import (
    AdvisedInstances,
    PlacedGroup,
    PlanExplained,
    PlannedLso,
    QueueHead,
    WaitAccuracy,
)
from solver.prediction.time_distribution import TimeDistribution

_LEAST_WIDTH = 16
"""Least width of the bars of the service chart in columns."""
_SHOWN = 0.9
"""Probability with which a request's service begins within the printed interval."""


def first(plan: PlanExplained, count: int) -> PlanExplained:
    """The first *count* groups of the plan, and the heads of the queues with these groups."""
    groups = plan.groups[:count]
    shown = {group.instance_id for group in groups}
    heads = tuple(head for head in plan.heads if not groups or head.instance_id in shown)
    return msgspec.structs.replace(plan, groups=groups, heads=heads)


def summary(plan: PlanExplained) -> str:
    """Summary of the plan in one line."""
    cause = f", replanned for {plan.cause}" if plan.cause else ""
    return (
        f"epoch {plan.epoch}  by {plan.leader_id}  {plan.policy}{cause}; "
        f"{len(plan.groups)} groups, {plan.late_share:.1%} of the weight expected late"
        + "".join(_advice(each) for each in plan.advice if each.advised != each.present)
        + (_waits(plan.waits) if plan.waits else "")
    )


def queues(plan: PlanExplained) -> str:
    """Text of each virtual queue, head first."""
    lines = [summary(plan)]
    swaps = {head.instance_id: head for head in plan.heads if head.swaps_model}
    for instance, groups in sorted(_by_instance(plan.groups).items()):
        swap = swaps.get(InstanceId(instance))
        lines.append(instance if swap is None else f"{instance}  {_swap(swap)}")
        for group in groups:
            lines += [
                f"  {group.position + 1:>3}. {_name(group)}  x{group.num_requests}",
                (
                    f"       turn in {_turn(group)}, {_deadline(group)}, "
                    f"late {group.late_probability:.0%}"
                ),
            ]
    return "\n".join(lines)


def reasons(plan: PlanExplained) -> str:
    """Text of explained groups: their positions, and the costs of alternative positions."""
    lines = [summary(plan)]
    for group in plan.groups:
        where = (
            f"{group.instance_id} #{group.position + 1}, turn in {_turn(group)}"
            if group.instance_id
            else "in no queue: no instance may serve its model"
        )
        lines.append(
            f"{_name(group)}  x{group.num_requests}: {where}, {_deadline(group)}, "
            f"late with probability {group.late_probability:.0%}"
        )
        lines += [
            f"    {other.instance_id} #{other.position + 1}: turn in {_time(other.wait_s)}, "
            f"the plan would cost {other.extra_cost:+.2%} of the weight"
            for other in group.others
        ]
    lines += [line for head in plan.heads for line in _head(head)]
    return "\n".join(lines)


def difference(before: PlanExplained, after: PlanExplained) -> str:
    """Text of the changes between two plans: groups that moved, appeared or disappeared."""
    old, new = _places(before), _places(after)
    lines = [f"epoch {before.epoch} -> {after.epoch}" + (f", {after.cause}" if after.cause else "")]
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            lines.append(f"  - {name}  was {old[name]}")
        elif name not in old:
            lines.append(f"  + {name}  {new[name]}")
        elif old[name] != new[name]:
            lines.append(f"  ~ {name}  {old[name]} -> {new[name]}")
    return "\n".join(lines if len(lines) > 1 else [*lines, "  nothing moved"])


def gantt(plan: PlanExplained, *, columns: int = 80) -> str:
    """
    Chart of the times at which each instance serves each model; groups of one lane form one bar.

    Args:
        plan: The plan.
        columns: Width of the chart; names of groups are shown whole.
    """
    served = [group for group in plan.groups if group.wait_s is not None]
    if not served:
        return "nothing waits"
    end_s = max(1e-9, *(group.wait_s or 0.0 for group in served))
    width = max(_LEAST_WIDTH, columns - 3 - max(len(_name(group)) for group in served))
    lines = []
    for instance, groups in sorted(_by_instance(served).items()):
        lines.append(instance)
        for group in groups:
            column = min(width - 1, int(width * (group.wait_s or 0.0) / end_s))
            mark = "!" if group.late_probability > 0.5 else "#"  # noqa: PLR2004 - rather late than not
            lines.append(f"  {'.' * column}{mark:<{width - column}} {_name(group)}")
    lines.append(f"  0{'s':<{width - 8}}{_time(end_s):>7}")
    lines.append("  !: late with a probability above 50%")
    return "\n".join(lines)


def _advice(advice: AdvisedInstances) -> str:
    share = "" if advice.attainment is None else f", with {advice.attainment:.1%} in time"
    return f"\n{advice.device}: {advice.advised} instances instead of {advice.present}{share}"


def _waits(waits: WaitAccuracy) -> str:
    return (
        f"\nwaits of lanes: {waits.mean_ratio:.2f} times the predictions, {waits.coverage:.0%} "
        f"of the last {waits.count} in their 90 % interval"
    )


def _head(head: QueueHead) -> list[str]:
    """Table of the next LLM serving operations on one instance."""
    if head.swaps_model:
        title = f"{head.instance_id}: {_swap(head)}"
    else:
        has = f"continues with {head.active}" if head.active else "has no model"
        title = f"{head.instance_id}: {has}"
    if not head.lsos:
        return [f"{title}, nothing else to do"]
    rows = [(lso.lso, _subject(lso), _cost(lso), lso.reason) for lso in head.lsos]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        title,
        *(
            f"    {kind:<{widths[0]}}  {subject:<{widths[1]}}  {cost:>{widths[2]}}  {reason}"
            for kind, subject, cost, reason in rows
        ),
    ]


def _swap(head: QueueHead) -> str:
    return f"{head.active or 'no model'} -> {head.model}"


def _subject(lso: PlannedLso) -> str:
    return f"about {lso.requests} of {lso.subject}" if lso.requests else lso.subject


def _cost(lso: PlannedLso) -> str:
    return "?" if lso.predicted_s is None else f"{lso.predicted_s:.3g} s"


def _by_instance(groups: Sequence[PlacedGroup]) -> Mapping[str, list[PlacedGroup]]:
    found: dict[str, list[PlacedGroup]] = {}
    for group in sorted(groups, key=lambda each: each.position):
        found.setdefault(group.instance_id or "nowhere", []).append(group)
    return found


def _places(plan: PlanExplained) -> Mapping[str, str]:
    return {
        _name(group): f"{group.instance_id} #{group.position + 1}"
        if group.instance_id
        else "nowhere"
        for group in plan.groups
    }


def _name(group: PlacedGroup) -> str:
    return f"{group.lane}/{group.number}"


def _turn(group: PlacedGroup) -> str:
    """Mean wait of a group, with a 90 % interval if the standard deviation is known."""
    if group.wait_s is None or group.wait_sd_s is None:
        return _time(group.wait_s)
    wait = TimeDistribution.of(group.wait_s, group.wait_sd_s**2)
    low_s, high_s = (_time(float(end_s)) for end_s in wait.interval(_SHOWN))
    return f"{_time(group.wait_s)} ({low_s} to {high_s})"


def _deadline(group: PlacedGroup) -> str:
    return "best effort" if group.time_left_s is None else f"due in {_time(group.time_left_s)}"


def _time(seconds: Seconds | None) -> str:
    if seconds is None:
        return "never"
    return f"{seconds:.1f} s" if abs(seconds) < 600 else f"{seconds / 60:.0f} min"  # noqa: PLR2004 - ten minutes
