"""The leader's view of the simulated mesh: groups, instances, service rates."""

from collections.abc import Mapping, Sequence

from ops.sim.mesh.conduct import PullKey
from ops.sim.mesh.lanes import MeshLanes
from ops.sim.mesh.profiling import Measured
from ops.sim.mesh.request import MeshRequest
from shared.contracts.base import InstanceId, ModelName, UnixTime
from solver.planning.problem.grouping import GroupId, RequestGroup, Spread, group_size, groups_of
from solver.planning.problem.snapshot import ClusterSnapshot, InstanceView

Places = Mapping[GroupId, tuple[InstanceId, int]]


def grouped(
    lanes: MeshLanes,
    profiles: Mapping[tuple[str, ModelName], Measured],
    *,
    batch_multiple: float,
    now: UnixTime,
) -> tuple[RequestGroup, ...]:
    """Groups of all waiting requests, formed in the same way as by the planner."""
    groups: list[RequestGroup] = []
    for lane in lanes.statistics():
        known = [each for (_, model), each in profiles.items() if model == lane.key.model]
        size = group_size(
            lane,
            average_batch=max(each.average_batch for each in known),
            token_rate_per_s=max(each.rates.token_rate_per_s for each in known),
            batch_multiple=batch_multiple,
        )
        groups += groups_of(lane, size=size, now=now)
    return tuple(groups)


def one_by_one(lanes: MeshLanes, key: PullKey, *, count: int) -> tuple[RequestGroup, ...]:
    """
    Groups of one request each, for the first *count* requests by *key*, for policies without
    groups.

    Instances serve at most *count* requests until the next plan.
    """
    heads = [request for members in lanes.first(count).values() for request in members]
    heads.sort(key=lambda request: (key(request), request.place_in_traffic))
    return tuple(_single(lanes, request) for request in heads[:count])


def _single(lanes: MeshLanes, request: MeshRequest) -> RequestGroup:
    spread = lanes.answers.of(request)
    return RequestGroup(
        group_id=GroupId(request.lane, request.place_in_traffic),
        key=lanes.key(request.lane),
        num_requests=1,
        oldest_deadline_at=request.deadline_at,
        youngest_deadline_at=request.deadline_at,
        time_left_s=request.left_s,
        interactive=request.interactive,
        prompt_tokens=Spread(request.num_prefill_tokens),
        output_tokens=spread,
    )


def snapshot_of(
    groups: tuple[RequestGroup, ...],
    instances: Sequence[InstanceView],
    profiles: Mapping[tuple[str, ModelName], Measured],
    *,
    running: Places,
    now: UnixTime,
) -> ClusterSnapshot:
    """Snapshot of the mesh at the time *now*."""
    return ClusterSnapshot(
        now=now,
        groups=groups,
        instances=tuple(instances),
        rates={key: each.rates for key, each in profiles.items()},
        running=running,
    )
