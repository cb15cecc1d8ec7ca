"""How operations end."""

from dataclasses import dataclass

from shared.contracts.base import Seconds
from shared.contracts.control import LsoOutcome
from shared.contracts.errors import MeshError


class LsoRefusedError(MeshError):
    """The operation makes no sense here and now. Nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LsoResult:
    """What an operation did."""

    outcome: LsoOutcome = LsoOutcome.DONE
    message: str = ""
    """For people: what was done, why it was refused, what failed."""
    num_bytes: int = 0
    """Of KV or weights that were moved or dropped, as far as that is known."""
    duration_s: Seconds = 0.0
    """Set by the executor."""

    @property
    def ok(self) -> bool:
        return self.outcome in (LsoOutcome.DONE, LsoOutcome.ALREADY)


def already(message: str) -> LsoResult:
    """There was nothing to do."""
    return LsoResult(outcome=LsoOutcome.ALREADY, message=message)
