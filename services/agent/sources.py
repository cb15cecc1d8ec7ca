"""The queues that an instance pulls from while a model is active."""

from collections.abc import Iterable

from shared.contracts.base import InstanceId
from shared.contracts.lanes import LaneKey, LaneLayout, inbox_name
from solver.planning.lanes import band_lower_edge_s
from solver.scheduling.pulling import Source, SourceKind


def sources_of(instance_id: InstanceId, queues: Iterable[str], layout: LaneLayout) -> list[Source]:
    """
    The instance's inbox and *queues*, as sources.

    Args:
        instance_id: Owner of the inbox.
        queues: Lanes and companion queues of the active model that exist.
        layout: Queue layout, for the deadlines of lanes.
    """
    inbox = Source(queue=inbox_name(instance_id), kind=SourceKind.INBOX, time_left_s=0.0)
    return [inbox, *(_source(queue, layout) for queue in sorted(queues))]


def _source(queue: str, layout: LaneLayout) -> Source:
    kind = queue.partition(".")[0]
    if kind == "relegated":
        return Source(queue=queue, kind=SourceKind.RELEGATED, time_left_s=0.0)
    if kind == "resume":
        band = int(queue.rpartition(".")[2])
        time_left_s = band_lower_edge_s(band, layout)
        return Source(queue=queue, kind=SourceKind.RESUME, time_left_s=time_left_s)
    key = LaneKey.parse(queue)
    overflow = queue == key.overflow_name
    return Source(
        queue=queue,
        kind=SourceKind.OVERFLOW if overflow else SourceKind.LANE,
        time_left_s=band_lower_edge_s(key.band, layout),
        behind=key.queue_name if overflow else None,
    )
