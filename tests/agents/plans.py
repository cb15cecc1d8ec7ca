"""Plans as published by a leader."""

from shared.contracts.base import InstanceId, ModelName
from shared.contracts.plans import LaneQuota, PlanPublished, Segment, VirtualQueue
from tests.clocks import NOW


def a_plan(*models: ModelName, epoch: int = 1, lanes: tuple[str, ...] = ()) -> PlanPublished:
    """A plan with one segment per model; each segment has *lanes*."""
    quotas = tuple(LaneQuota(lane=lane, quota=1) for lane in lanes)
    segments = tuple(Segment(model=model, lanes=quotas) for model in models)
    return PlanPublished(
        epoch=epoch,
        issued_at=NOW,
        leader_id="leader",
        queue=VirtualQueue(instance_id=InstanceId("i1"), segments=segments),
        policy="test",
    )
