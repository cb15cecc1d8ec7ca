"""Droppable parts of a scheduled iteration at a safepoint; does not import vLLM."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.contracts.base import UnixTime


@dataclass(frozen=True, slots=True)
class SafepointOrder:
    """Message that the scheduler sends to the worker with an iteration."""

    number: int
    """Number of the iteration, as shown to the front."""
    droppable: frozenset[str]
    """Requests whose part of the iteration is dropped if it is preempted."""
    at_once: bool
    """Preempt at the first safepoint, since the urgent request has already been submitted."""


@dataclass(frozen=True, slots=True)
class DroppablePart:
    """A request's part of an iteration, and its state if the part is dropped."""

    request_id: str
    kept_tokens: int
    """Tokens computed before the iteration."""
    blocks: tuple[int, ...]
    """KV blocks from the first one that would be incomplete if the part is dropped."""
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
    Best-effort requests of a scheduled iteration, and the requests that depend on them.

    vLLM puts blocks into its prefix cache when they are scheduled, so a request that is admitted in
    the same iteration may use blocks that another request has yet to compute in it. The admitted
    request is dropped together with that other request.

    Args:
        num_scheduled: Tokens by request, in the order in which they were scheduled.
        requests: vLLM's requests with the iteration already counted as computed;
            `headway_droppable_until` is set by Headway.
        blocks_from: KV blocks of a request from an index on.
        admitted: Requests that were waiting before this iteration.
        block_tokens: Tokens in one block.
        now: Requests whose `headway_droppable_until` has passed are not dropped.
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
