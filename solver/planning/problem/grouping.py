"""Request groups from the statistics of lanes (QLM §4, algorithm 1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.lanes import LaneKey
from solver.planning.problem.arrival_curve import enqueued_at

GROUP_BATCH_MULTIPLE = 4
"""Number of requests in a group as a multiple of the requests in an average batch (QLM's delta)."""
TIME_LEFT_SHARE = 0.25
"""Maximum share of a group's time left to the deadline that serving the group may take."""
ACTIVATIONS = 4.0
"""
Most work of a group, as a multiple of the time to activate its model: a burst of one model must
consist of several groups, if it is worth an activation on another instance.
"""
ENOUGH_GROUPS = 32
"""Number of groups of a lane from which its work can be divided without smaller groups."""


class Spread(NamedTuple):
    """Mean and standard deviation of an amount."""

    mean: float
    sd: float = 0.0


class GroupId(NamedTuple):
    """
    Identity of a request group across plans; independent of requests that leave or join the group.
    """

    lane: str
    number: int
    """
    Number of the group within its lane; the group begins at the lane's request number `number` ·
    group size.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatistics:
    """Counts of the waiting requests of one lane and its companion queues."""

    key: LaneKey
    waiting: int
    relegated: int = 0
    """Number of these requests that were relegated, and are late in any case."""
    arrivals: Sequence[tuple[UnixTime, float]] = ()
    """Cumulative requests over time (`arrival_curve.merged`); empty when unknown."""
    time_left_s: Seconds = math.inf
    """Mean time left to the deadline when a request was enqueued; infinite for best effort."""
    interactive: bool = False
    """True if most requests wait for their first token."""
    prompt_tokens: Spread
    output_tokens: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGroup:
    """
    Consecutive requests of one lane: equal in model, importance, deadline band and work class.

    A group does not store its requests: it refers to a number of requests that are pulled from the
    lane next.
    """

    group_id: GroupId
    key: LaneKey
    num_requests: int
    oldest_deadline_at: UnixTime
    youngest_deadline_at: UnixTime
    time_left_s: Seconds
    """Mean time left to the deadline at ingest; tardiness is measured in multiples of this time."""
    interactive: bool
    prompt_tokens: Spread
    output_tokens: Spread
    relegated_share: float = 0.0
    """Share of the requests that were relegated: they are late in any case."""


def group_size(
    lane: LaneStatistics,
    *,
    average_batch: float,
    token_rate_per_s: float,
    activate_s: Seconds = math.inf,
    batch_multiple: float = GROUP_BATCH_MULTIPLE,
) -> int:
    """
    Largest number of requests in a group of *lane*.

    Args:
        average_batch: Requests that an instance computes at once.
        token_rate_per_s: Throughput of one instance, prompts included.
        activate_s: Time to activate the model where it is not active.
        batch_multiple: QLM's delta.

    Source: QLM §4, §8.3.
    Differs: serving a group may take at most `TIME_LEFT_SHARE` of the time left to its deadline.
    Otherwise a group of hundreds of requests would take longer than a chat may wait, and would
    occupy one instance while other instances are idle. For the same reason, it may take at most
    `ACTIVATIONS`, but a batch is not divided, and neither is a lane that has `ENOUGH_GROUPS`.
    Sizes are powers of two, so that small changes of the average batch do not change groups.
    """
    most = max(1.0, batch_multiple * average_batch)
    requests_per_s = token_rate_per_s / max(1.0, lane.prompt_tokens.mean + lane.output_tokens.mean)
    least = max(average_batch, lane.waiting / ENOUGH_GROUPS)
    most = min(most, max(least, ACTIVATIONS * activate_s * requests_per_s))
    if math.isfinite(lane.time_left_s):
        most = min(most, TIME_LEFT_SHARE * lane.time_left_s * requests_per_s)
    return 1 << max(0, math.floor(math.log2(max(1.0, most))))


def groups_of(lane: LaneStatistics, *, size: int, now: UnixTime) -> list[RequestGroup]:
    """
    The groups of one lane, oldest first, each at most *size* requests.

    Args:
        lane: Has waiting requests.
        size: Requests of a full group; the first and the last group may have fewer.
        now: Assumed arrival time of all requests if arrivals are unknown.

    Source: QLM algorithm 1. Lanes replace its clusters: the lane of a request follows from model,
    importance, deadline and work in O(1), by fixed edges instead of k-means
    (`solver.planning.lanes`).
    Differs: a lane is cut into equal groups at fixed request numbers instead of repeated halves, so
    that a group keeps its identity while requests come and go.
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
                relegated_share=lane.relegated / lane.waiting,
            )
        )
    return groups


def _deadline_at(lane: LaneStatistics, rank: int, now: UnixTime) -> UnixTime:
    """Deadline of request number *rank*; the newest request has number 1."""
    if math.isinf(lane.time_left_s):
        return math.inf
    came_at = enqueued_at(lane.arrivals, rank) if lane.arrivals else now
    return came_at + lane.time_left_s
