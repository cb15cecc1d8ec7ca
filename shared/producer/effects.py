"""Effects of a reply at its producer, which `RequestAssembly` returns."""

from dataclasses import dataclass

from shared.contracts.base import InstanceId, RunId
from shared.contracts.control import StopReason
from shared.contracts.requests import Final, StepDetails, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """
    Effect: the next part of an answer; successive parts have no gap and no overlap.

    The text of a part's tokens can come with a later part.
    """

    offset: int
    """Index of the first token in the answer."""
    token_ids: Tokens
    text: str
    details: tuple[StepDetails, ...] = ()
    """Details of all of `token_ids`, or none; the final has the details of all tokens."""
    child: int = 0
    """Index of the answer, if a call has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """The answer contradicts tokens that were already emitted; the stream cannot continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStop:
    """Effect: send a command to *instance_id* to stop a run that is not needed."""

    run_id: RunId
    instance_id: InstanceId
    reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Effect: the request has ended; this effect is emitted exactly once."""

    final: Final


Effect = NewTokens | Diverged | SendStop | Finished
