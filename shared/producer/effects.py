"""What a reply means to the producer that asked: the outputs of `RequestAssembly`."""

from dataclasses import dataclass

from shared.contracts.base import InstanceId, RunId
from shared.contracts.control import StopReason
from shared.contracts.requests import Final, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """
    The next part of the answer; parts follow each other without gap or overlap.

    Text may trail its tokens: a part can bring tokens whose text comes with a later part.
    """

    offset: int
    """Index of the first token in the answer."""
    token_ids: Tokens
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """The answer contradicts tokens that were already handed out; the stream cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStop:
    """Tell *instance_id* that its run is not wanted."""

    run_id: RunId
    instance_id: InstanceId
    reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The request is over, exactly once."""

    final: Final


Effect = NewTokens | Diverged | SendStop | Finished
