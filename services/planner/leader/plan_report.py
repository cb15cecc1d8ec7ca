"""Answers to operators about the plan in force."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from services.planner.leader.policies import Planned
from services.planner.leader.rates import device_of
from services.planner.state import LeaderState
from shared.contracts.base import InstanceId, UnixTime
from shared.contracts.plans import (
    AdvisedInstances,
    LaneForecast,
    OtherPlace,
    PlacedGroup,
    WaitAccuracy,
)
from solver.planning import explanation
from solver.planning.problem.snapshot import ClusterSnapshot
from solver.prediction.calibration.lane_waits import LaneWaits
from solver.prediction.time_distribution import TimeDistribution


def named_groups(
    snapshot: ClusterSnapshot, groups: tuple[explanation.PlacedGroup, ...]
) -> tuple[PlacedGroup, ...]:
    """Request groups of the plan, with the names of lanes and instances that messages use."""
    return tuple(_group(snapshot, group) for group in groups)


def cause_of(planned: Planned) -> str | None:
    """Cause of the last replan; None if the plan was kept or its policy reports no cause."""
    cause = planned.review.cause if planned.review else None
    return cause.value if cause else None


def advice_of(state: LeaderState) -> tuple[AdvisedInstances, ...]:
    """
    Advised number of instances per kind of device, also of devices without instances; without
    advice, the current number.
    """
    present = Counter(device_of(each) for each in state.instances.values())
    known = {each.device: each for each in state.advice}
    return tuple(
        replace(known[device], present=present[device])
        if device in known
        else AdvisedInstances(device=device, present=present[device], advised=present[device])
        for device in sorted(known.keys() | present.keys())
    )


def corrected_forecasts(
    waits: LaneWaits, forecasts: Sequence[LaneForecast], now: UnixTime
) -> Sequence[LaneForecast]:
    """Lane forecasts whose waits are corrected by the outcomes of earlier forecasts."""
    pairs = [(each.wait_s, each.wait_sd_s) for each in forecasts]
    known = [index for index, pair in enumerate(pairs) if None not in pair]
    means_s, sds_s = np.array([pairs[index] for index in known], np.float64).reshape(-1, 2).T
    corrected = waits.predict(
        [forecasts[index].lane for index in known], TimeDistribution(means_s, sds_s**2), now
    )
    made = list(forecasts)
    for index, wait_s, sd_s in zip(
        known, corrected.mean_s.tolist(), corrected.sd_s.tolist(), strict=True
    ):
        raw = made[index]
        ratio = wait_s / raw.wait_s if raw.wait_s else 1.0
        made[index] = replace(raw, wait_s=wait_s, wait_sd_s=sd_s, request_s=ratio * raw.request_s)
    return made


def waits_of(waits: LaneWaits) -> WaitAccuracy | None:
    """Accuracy of earlier lane forecasts; None if no outcome is known."""
    report = waits.report()
    if report is None:
        return None
    return WaitAccuracy(
        count=report.count,
        mean_ratio=report.mean_ratio,
        coverage=report.coverage,
        raw_coverage=report.raw_coverage,
    )


def _group(snapshot: ClusterSnapshot, placed: explanation.PlacedGroup) -> PlacedGroup:
    group = snapshot.groups[placed.group]
    served = math.isfinite(placed.turn_s)
    left_s = group.oldest_deadline_at - snapshot.now
    return PlacedGroup(
        lane=group.group_id.lane,
        number=group.group_id.number,
        num_requests=group.num_requests,
        instance_id=_instance(snapshot, placed.instance) if served else None,
        position=placed.position,
        wait_s=placed.turn_s if served else None,
        wait_sd_s=placed.turn_sd_s if served else None,
        time_left_s=left_s if math.isfinite(left_s) else None,
        late_probability=placed.late_probability,
        others=tuple(
            OtherPlace(
                instance_id=_instance(snapshot, other.instance),
                position=other.position,
                extra_cost=other.extra_cost,
                wait_s=other.turn_s,
            )
            for other in placed.others
        ),
    )


def _instance(snapshot: ClusterSnapshot, number: int) -> InstanceId:
    return snapshot.instances[number].instance_id
