"""What the scheduler's side of the connector and the worker's say to each other."""

from dataclasses import dataclass
from typing import NamedTuple


class Transfer(NamedTuple):
    """A copy between a block of the engine's KV and a slot of host memory."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """
    What one iteration copies before it computes: first all saves in order, then all loads.

    A saved block is complete but may belong to another request by now, which will write it in
    this iteration.
    """

    step: int
    """Counts iterations; one that is carried out again copies nothing again."""
    saves: tuple[Transfer, ...] = ()
    loads: tuple[Transfer, ...] = ()
    cleared: bool = False
    """All copies are forgotten, before anything else."""
