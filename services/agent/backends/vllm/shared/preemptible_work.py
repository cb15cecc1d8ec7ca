"""Parts of a scheduled iteration that can be dropped at a safepoint; imports no vLLM."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.contracts.base import UnixTime


@dataclass(frozen=True, slots=True)
class SafepointOrder:
    """Message that the scheduler sends to the worker with an iteration."""

    number: int
    """Number of the iteration, as published to the front."""
    droppable: frozenset[str]
    """Requests whose parts are dropped if the iteration is preempted."""
    at_once: bool
    """True if an urgent request already waits: preempt at the first safepoint."""


@dataclass(frozen=True, slots=True)
class DroppablePart:
    """A request's part of an iteration, and the request's state if the part is dropped."""

    request_id: str
    kept_tokens: int
    """Number of the request's tokens that earlier iterations have computed."""
    blocks: tuple[int, ...]
    """
    KV blocks of the request, beginning with the first block that stays incomplete if the part is
    dropped.
    """
    depends: bool = False
    """True if the request uses blocks that another request must compute in the same iteration."""


def droppable_parts(
    num_scheduled: Mapping[str, int],
    requests: Mapping[str, Any],
    blocks_from: Callable[[str, int], Sequence[int]],
    *,
    admitted: Container[str],
    block_tokens: int,
    now: UnixTime,
) -> list[DroppablePart]:
    """
    The droppable parts: best-effort requests of a scheduled iteration, and requests that depend on
    them.

    vLLM puts blocks into its prefix cache when they are scheduled. A request that is admitted in
    the same iteration may thus use blocks that another request computes in that iteration; both
    requests are then dropped together.

    Args:
        num_scheduled: Scheduled tokens by request, in scheduling order.
        requests: vLLM's requests, in which the iteration already counts as computed. Headway sets
            their field `headway_droppable_until`.
        blocks_from: Returns the KV blocks of a request from a block index on.
        admitted: Requests that were waiting before this iteration.
        block_tokens: Tokens in one block.
        now: Current time; requests whose `headway_droppable_until` has passed are not dropped.
    """
    parts: list[DroppablePart] = []
    unsure: set[int] = set()
    for request_id, count in num_scheduled.items():
        request = requests[request_id]
        before = request.num_computed_tokens - count
        depends = False
        if unsure and before and request_id in admitted:
            used = blocks_from(request_id, 0)[: -(-before // block_tokens)]
            depends = not unsure.isdisjoint(used)
        if depends or now < request.headway_droppable_until:
            blocks = tuple(blocks_from(request_id, before // block_tokens))
            unsure.update(blocks)
            parts.append(DroppablePart(request_id, before, blocks, depends))
    return parts
