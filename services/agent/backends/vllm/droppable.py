"""What of a scheduled iteration may be dropped at a safepoint; without vLLM itself."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.contracts.base import UnixTime


@dataclass(frozen=True, slots=True)
class SafepointOrder:
    """What the scheduler tells the worker with an iteration."""

    number: int
    """Of the iteration, as shown to the front."""
    droppable: frozenset[str]
    """Requests that are not computed if it is cut."""
    at_once: bool
    """Cut at the first safepoint: what it is for is on its way."""


@dataclass(frozen=True, slots=True)
class DroppablePart:
    """A request's part of an iteration, and what holds if it is dropped."""

    request_id: str
    kept_tokens: int
    """Computed before."""
    blocks: tuple[int, ...]
    """KV blocks from the first on that is then not complete."""
    depends: bool = False
    """It counts as computed what another request was to compute in the same iteration."""


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
    Best-effort requests of an iteration that is scheduled, and whoever depends on them.

    vLLM puts blocks into its prefix cache when they are scheduled, so a request that is admitted
    in the same iteration may count on what another is to compute in it. It goes when the other
    goes.

    Args:
        num_scheduled: Tokens by request, in the order in which they got them.
        requests: vLLM's, counted as computed already; `headway_droppable_until` is ours.
        blocks_from: KV blocks of a request from an index on.
        admitted: Those that waited before this iteration.
        block_tokens: In one block.
        now: What has become old enough for a share of its own is not dropped.
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
