"""Classification of a request into its lane, in O(1)."""

import math

import msgspec

from shared.contracts.base import ModelName, Seconds
from shared.contracts.lanes import LaneKey, LaneLayout, WorkClass, work_version_of
from shared.contracts.qos import Importance

ALIVE_WORK_VERSIONS = 4
"""Learnt edges are not replaced again before the lanes of older ones are gone."""


def is_bygone(queue_name: str, work_version: int) -> bool:
    """Whether a lane is of edges so old that it cannot exist beside those of *work_version*."""
    return 0 < work_version_of(queue_name) <= work_version - ALIVE_WORK_VERSIONS


def band_of(time_left_s: Seconds, layout: LaneLayout) -> int:
    """
    Deadline band of a request with *time_left_s* to its deadline at ingest.

    Bands are geometric, so FIFO inside a lane is EDF up to the width of one band: of two
    requests of one band, one that overtakes another's deadline wrongly does so by less than
    (ratio - 1) times the band's lower edge; in band 0, which has none, by less than
    `first_band_s` and however late they came. The last band before best effort is open-ended
    and promises nothing.

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
    """Least time left at ingest of a request in *band*; infinite for best effort."""
    if band == layout.best_effort_band:
        return math.inf
    return 0.0 if band == 0 else layout.first_band_s * layout.band_ratio ** (band - 1)


def work_class_of(work_tokens: float, edge_tokens: float) -> WorkClass:
    """Short below the edge of predicted prefill + decode tokens, else long."""
    return WorkClass.LONG if work_tokens >= edge_tokens else WorkClass.SHORT


def lane_for(
    *,
    model: ModelName,
    importance: Importance,
    time_left_s: Seconds,
    work_tokens: float,
    layout: LaneLayout,
) -> LaneKey:
    """The lane of a request (QLM §4.1: model, SLO and token distribution make a group)."""
    return LaneKey.of(
        layout,
        model=model,
        importance=importance,
        band=band_of(time_left_s, layout),
        work=work_class_of(work_tokens, layout.work_edge_of(model)),
    )


def all_lanes(models: tuple[ModelName, ...], layout: LaneLayout) -> tuple[LaneKey, ...]:
    """
    Every lane that *layout* can have; bounded, so a fresh leader can count them all.

    Lanes of the last `ALIVE_WORK_VERSIONS` learnt edges are among them: they may still drain.
    """
    oldest = max(1, layout.work_version - ALIVE_WORK_VERSIONS + 1)
    layouts = [
        msgspec.structs.replace(layout, work_version=version)
        for version in (0, *range(oldest, layout.work_version + 1))
    ]
    return tuple(
        LaneKey.of(each, model=model, importance=importance, band=band, work=work)
        for each in layouts
        for model in models
        for importance in Importance
        for band in range(layout.num_bands + 1)
        for work in WorkClass
    )
