"""Messages between the scheduler's side of the connector and the worker's."""

from dataclasses import dataclass
from typing import NamedTuple


class Transfer(NamedTuple):
    """A copy between a block of the engine's KV and a slot of host memory."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """
    Copies of one iteration before it computes: first all saves in order, then all loads.

    A saved block is complete but may already belong to another request, which will overwrite it
    in this iteration.
    """

    step: int
    """Iteration counter; an iteration that is carried out again copies nothing again."""
    saves: tuple[Transfer, ...] = ()
    loads: tuple[Transfer, ...] = ()
    cleared: bool = False
    """Drop all copies before anything else."""
