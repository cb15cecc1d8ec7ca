"""Classification of a request into its lane, in O(1)."""

import math
from collections.abc import Iterable

from shared.contracts.base import ModelName, Seconds
from shared.contracts.lanes import LaneKey, LaneLayout, relegated_name
from shared.contracts.qos import Importance

_LANE_PARTS, _RESUME_PARTS = 5, 3
"""Parts of a queue's name after its kind: layout, model, importance, band, work; see `LaneKey`."""


def band_of(time_left_s: Seconds, layout: LaneLayout) -> int:
    """
    Deadline band of a request with *time_left_s* to its deadline at ingest.

    Bands are geometric, so FIFO inside a lane is EDF up to the width of one band. If a request is
    served before another request of its band with an earlier deadline, the two deadlines differ by
    less than (ratio - 1) times the band's lower edge. In band 0 they differ by less than
    `first_band_s` plus the time that a request was late at ingest. The last band before best effort
    is open-ended, so it has no bound.

    Args:
        time_left_s: Seconds; infinite for best effort, negative when already late.
        layout: Edges of the bands.
    """
    if math.isinf(time_left_s):
        return layout.best_effort_band
    if time_left_s < layout.first_band_s:
        return 0
    band = 1 + math.floor(math.log(time_left_s / layout.first_band_s, layout.band_ratio) + 1e-9)
    return min(band, layout.num_bands - 1)


def band_lower_edge_s(band: int, layout: LaneLayout) -> Seconds:
    """
    Least time left to the deadline at ingest of a request in *band*; infinite for best effort.
    """
    if band == layout.best_effort_band:
        return math.inf
    return 0.0 if band == 0 else layout.first_band_s * layout.band_ratio ** (band - 1)


def longest_deadline_s(queue: str, layout: LaneLayout) -> Seconds | None:
    """
    Longest time from grouping to deadline of the requests in *queue*, a lane or the queue of
    evicted requests of a band.

    None if the time has no bound: for best effort, for the last band before it, and for overflow
    and relegated requests, which wait behind others. Also None for other layouts.
    """
    kind, *parts = queue.split(".")
    if kind == "lane" and len(parts) == _LANE_PARTS:
        band = parts[3]
    elif kind == "resume" and len(parts) == _RESUME_PARTS:
        band = parts[2]
    else:
        return None
    if parts[0] != str(layout.version) or not band.isdecimal():
        return None
    if int(band) >= layout.num_bands - 1:
        return None
    return band_lower_edge_s(int(band) + 1, layout)


def work_class_of(work_tokens: float, layout: LaneLayout) -> int:
    """
    Work class of a request with *work_tokens* predicted prefill + decode tokens.

    Classes are geometric, so that a request waits behind requests of at most `work_ratio` times its
    work. The last class is open-ended: its requests may wait behind requests of any size.
    """
    if work_tokens <= layout.first_work_tokens:
        return 0
    ratio = math.log(work_tokens / layout.first_work_tokens, layout.work_ratio)
    return min(math.ceil(ratio - 1e-9), layout.num_work_classes - 1)


def lane_for(
    *,
    model: ModelName,
    importance: Importance,
    time_left_s: Seconds,
    work_tokens: float,
    layout: LaneLayout,
) -> LaneKey:
    """
    The lane of a request, from its model, deadline, importance and predicted work.

    Source: QLM §4.1, algorithm 1: model, SLO and token distribution make a group.
    Differs: work classes are geometric and fixed instead of found by k-means, so that all groupers
    use the same classes.
    """
    return LaneKey.of(
        layout,
        model=model,
        importance=importance,
        band=band_of(time_left_s, layout),
        work=work_class_of(work_tokens, layout),
    )


def all_lanes(models: tuple[ModelName, ...], layout: LaneLayout) -> tuple[LaneKey, ...]:
    """All lanes that *layout* can have; their number is bounded, so a new leader can count them."""
    return tuple(
        LaneKey.of(layout, model=model, importance=importance, band=band, work=work)
        for model in models
        for importance in Importance
        for band in range(layout.num_bands + 1)
        for work in range(layout.num_work_classes)
    )


def queues_of(lanes: Iterable[LaneKey]) -> set[str]:
    """Queue names of *lanes* and of all companion queues of their models."""
    queues = set[str]()
    for key in lanes:
        queues |= {key.queue_name, key.overflow_name, key.resume_name, relegated_name(key.model)}
    return queues


def earlier_lanes(models: tuple[ModelName, ...], layout: LaneLayout) -> tuple[LaneKey, ...]:
    """
    Lanes of layout version 1, which may still hold requests; none if *layout* has version 1.

    Version 1 had two work classes with fixed edges. Each of at most four sets of learnt edges
    added two more.
    """
    if layout.version == 1:
        return ()
    return tuple(
        LaneKey(layout=1, model=model, importance=importance.value, band=band, work=work + version)
        for model in models
        for importance in Importance
        for band in range(layout.num_bands + 1)
        for work in ("short", "long")
        for version in ("", "-1", "-2", "-3", "-4")
    )
