"""Results of LLM serving operations."""

from dataclasses import dataclass

from shared.contracts.base import Seconds
from shared.contracts.control import LsoOutcome
from shared.contracts.errors import MeshError


class LsoRefusedError(MeshError):
    """
    The instance's current state does not allow the LLM serving operation; nothing was changed.
    """


class LsoFailedError(MeshError):
    """The LLM serving operation failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LsoResult:
    """Result of an LLM serving operation."""

    outcome: LsoOutcome = LsoOutcome.DONE
    message: str = ""
    """Text for operators: what the operation did, the reason of a refusal, or the failure."""
    num_bytes: int = 0
    """Number of bytes of KV or weights that the operation moved or dropped, as far as known."""
    duration_s: Seconds = 0.0
    """Duration of the LLM serving operation; the executor sets it."""

    @property
    def ok(self) -> bool:
        return self.outcome in (LsoOutcome.DONE, LsoOutcome.ALREADY)


def already(message: str) -> LsoResult:
    """Result of an LLM serving operation that had nothing left to do."""
    return LsoResult(outcome=LsoOutcome.ALREADY, message=message)
