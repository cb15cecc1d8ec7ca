"""Request groups from what is known of lanes (QLM §4, algorithm 1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.lanes import LaneKey
from solver.planning.arrival_curve import enqueued_at

GROUP_BATCH_MULTIPLE = 4
"""QLM's delta: requests of a group over those of an average batch."""
TIME_LEFT_SHARE = 0.25
"""Of its time left that a group may take to be served."""


class Spread(NamedTuple):
    """Mean and standard deviation."""

    mean: float
    sd: float = 0.0


class GroupId(NamedTuple):
    """What stays of a group from plan to plan, while its head is served and its tail fills."""

    lane: str
    number: int
    """The group holds the lane's requests from number · size on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatistics:
    """What waits in one lane and its companions. Counted, never listed."""

    key: LaneKey
    waiting: int
    arrivals: Sequence[tuple[UnixTime, float]] = ()
    """Cumulative requests over time (`arrival_curve.merged`); empty when nothing is known."""
    time_left_s: Seconds = math.inf
    """Mean time to the deadline when a request was enqueued; infinite for best effort."""
    interactive: bool = False
    """Whether first tokens are what most of them wait for."""
    prompt_tokens: Spread
    output_tokens: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGroup:
    """
    Neighbours in one lane: equal in model, importance, deadline band and work class.

    A reference, not a container: its members are whoever is pulled from the lane next.
    """

    group_id: GroupId
    key: LaneKey
    num_requests: int
    oldest_deadline_at: UnixTime
    youngest_deadline_at: UnixTime
    time_left_s: Seconds
    """At ingest: what tardiness is measured by."""
    interactive: bool
    prompt_tokens: Spread
    output_tokens: Spread


def group_size(
    lane: LaneStatistics,
    *,
    average_batch: float,
    token_rate_per_s: float,
    batch_multiple: float = GROUP_BATCH_MULTIPLE,
) -> int:
    """
    Most requests that a group of *lane* may hold.

    Args:
        lane: Whose.
        average_batch: Requests that an instance computes at once.
        token_rate_per_s: Of one instance, prompts included.
        batch_multiple: QLM's delta.

    Source: QLM §4, §8.3.
    Differs: groups are bounded by a quarter of the time that they have, too: a group of hundreds
    takes longer than a chat may wait, and is one instance's alone while others idle. Sizes are
    powers of two, so that small changes of a batch leave groups as they were.
    """
    most = max(1.0, batch_multiple * average_batch)
    if math.isfinite(lane.time_left_s):
        tokens = max(1.0, lane.prompt_tokens.mean + lane.output_tokens.mean)
        most = min(most, TIME_LEFT_SHARE * lane.time_left_s * token_rate_per_s / tokens)
    return 1 << max(0, math.floor(math.log2(max(1.0, most))))


def groups_of(lane: LaneStatistics, *, size: int, now: UnixTime) -> list[RequestGroup]:
    """
    The groups of one lane, oldest first, each at most *size* requests.

    Args:
        lane: With waiting requests.
        size: Of a whole group; the first and the last may hold less.
        now: When nothing is known of arrivals they are taken to have come just now.

    Source: QLM algorithm 1. Its clusters are the lanes: the queue is divided by model, deadline
    and work when a request is enqueued, in O(1) (`solver.planning.lanes`).
    Differs: cut into equal pieces instead of repeated halves, at fixed numbers of the lane's
    requests, so that a group keeps its identity while requests come and go.
    """
    if lane.waiting <= 0:
        return []
    total = max(lane.waiting, round(lane.arrivals[-1][1]) if lane.arrivals else lane.waiting)
    first = total - lane.waiting
    name = lane.key.queue_name
    groups = []
    for number in range(first // size, (total - 1) // size + 1):
        begin, end = max(first, number * size), min(total, (number + 1) * size)
        groups.append(
            RequestGroup(
                group_id=GroupId(name, number),
                key=lane.key,
                num_requests=end - begin,
                oldest_deadline_at=_deadline_at(lane, total - begin, now),
                youngest_deadline_at=_deadline_at(lane, total - end + 1, now),
                time_left_s=lane.time_left_s,
                interactive=lane.interactive,
                prompt_tokens=lane.prompt_tokens,
                output_tokens=lane.output_tokens,
            )
        )
    return groups


def _deadline_at(lane: LaneStatistics, rank: int, now: UnixTime) -> UnixTime:
    """Of the request number *rank*, the newest being 1."""
    if math.isinf(lane.time_left_s):
        return math.inf
    came_at = enqueued_at(lane.arrivals, rank) if lane.arrivals else now
    return came_at + lane.time_left_s
