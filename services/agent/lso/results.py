"""Results of operations."""

from dataclasses import dataclass

from shared.contracts.base import Seconds
from shared.contracts.control import LsoOutcome
from shared.contracts.errors import MeshError


class LsoRefusedError(MeshError):
    """The operation is not possible in the current state. Nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LsoResult:
    """Result of an operation."""

    outcome: LsoOutcome = LsoOutcome.DONE
    message: str = ""
    """Explanation for operators: result, reason of the refusal, or failure."""
    num_bytes: int = 0
    """Bytes of KV or weights that were moved or dropped, as far as known."""
    duration_s: Seconds = 0.0
    """Set by the executor."""

    @property
    def ok(self) -> bool:
        return self.outcome in (LsoOutcome.DONE, LsoOutcome.ALREADY)


def already(message: str) -> LsoResult:
    """Result of an operation that had nothing to do."""
    return LsoResult(outcome=LsoOutcome.ALREADY, message=message)
