"""Results of operations."""

from dataclasses import dataclass

from shared.contracts.base import Seconds
from shared.contracts.control import LsoOutcome
from shared.contracts.errors import MeshError


class LsoRefusedError(MeshError):
    """The instance's current state does not allow the operation; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LsoResult:
    """Result of an operation."""

    outcome: LsoOutcome = LsoOutcome.DONE
    message: str = ""
    """Text for operators: the result, the reason of the refusal, or the failure."""
    num_bytes: int = 0
    """Known number of bytes of KV or weights that were moved or dropped."""
    duration_s: Seconds = 0.0
    """Duration of the operation; set by the executor."""

    @property
    def ok(self) -> bool:
        return self.outcome in (LsoOutcome.DONE, LsoOutcome.ALREADY)


def already(message: str) -> LsoResult:
    """Result of an operation for which nothing was left to do."""
    return LsoResult(outcome=LsoOutcome.ALREADY, message=message)
