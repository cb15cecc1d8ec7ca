"""Messages from the scheduler's side of the connector to the worker's side."""

from dataclasses import dataclass
from typing import NamedTuple


class Transfer(NamedTuple):
    """A copy between a block of the engine's KV and a slot of host memory."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """
    Copies that precede the computation of one iteration: first all saves in order, then all loads.

    A block to save is complete, but may already belong to another request that overwrites it in
    this iteration.
    """

    step: int
    """Number of the iteration; copies are not repeated when the iteration is executed again."""
    saves: tuple[Transfer, ...] = ()
    loads: tuple[Transfer, ...] = ()
    cleared: bool = False
    """True if all host copies are dropped before any transfer."""
