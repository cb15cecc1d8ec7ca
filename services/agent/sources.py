"""The queues that an instance pulls from while a model is active."""

from shared.contracts.base import InstanceId, ModelName
from shared.contracts.lanes import LaneKey, LaneLayout, inbox_name, relegated_name
from solver.planning.lanes import band_lower_edge_s
from solver.scheduling.pulling import Source, SourceKind


def sources_of(
    instance_id: InstanceId, model: ModelName, lanes: set[str], layout: LaneLayout
) -> list[Source]:
    """
    Lanes with all their companions, the inbox and the relegated queue, each queue once.

    Args:
        instance_id: Owner of the inbox.
        model: Model of the relegated queue.
        lanes: Names of lanes, overflow queues and resume queues of the model.
        layout: Queue layout, for the deadlines of lanes.
    """
    keys = {LaneKey.parse(lane) for lane in lanes if lane.startswith(("lane.", "overflow."))}
    inbox = inbox_name(instance_id)
    sources = {inbox: Source(queue=inbox, kind=SourceKind.INBOX, time_left_s=0.0)}
    for key in sorted(keys):
        time_left_s = band_lower_edge_s(key.band, layout)
        for queue, kind in (
            (key.resume_name, SourceKind.RESUME),
            (key.queue_name, SourceKind.LANE),
            (key.overflow_name, SourceKind.OVERFLOW),
        ):
            sources[queue] = Source(
                queue=queue,
                kind=kind,
                time_left_s=time_left_s,
                behind=key.queue_name if kind is SourceKind.OVERFLOW else None,
            )
    for queue in lanes:
        if queue.startswith("resume."):
            band = int(queue.rpartition(".")[2])
            time_left_s = band_lower_edge_s(band, layout)
            sources[queue] = Source(queue=queue, kind=SourceKind.RESUME, time_left_s=time_left_s)
    name = relegated_name(model)
    sources[name] = Source(queue=name, kind=SourceKind.RELEGATED, time_left_s=0.0)
    return list(sources.values())
