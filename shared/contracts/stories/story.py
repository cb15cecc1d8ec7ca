"""The record of a finished request: its stages and steps, without its prompt and its answer."""

import msgspec

from shared.contracts.base import (
    InstanceId,
    Message,
    RequestId,
    Seconds,
    TenantId,
    UnixTime,
    Value,
)
from shared.contracts.ends import DEADLINE_EXPIRED
from shared.contracts.qos import Slo
from shared.contracts.requests import Attempts, HistoryEntry, QueuedRequest, WaitForecast

COMPLETED = "completed"
"""Outcome of a request with an answer; other outcomes are codes of errors."""


class Story(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A finished request. Times are Unix seconds; those of stages that were not reached are 0."""

    request_id: RequestId
    tenant: TenantId
    outcome: str = COMPLETED
    """`completed` or the code of the error."""
    attained: bool = False
    """True if the request has its answer and met all of its targets."""
    model: str = ""
    lane: str = ""
    queue: str = ""
    """Queue from which the last instance pulled the request."""
    slo: Slo = Slo()
    session: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Number of tokens of the answer; the mean of the answers if the request has several."""
    arrived_at: UnixTime = 0.0
    grouped_at: UnixTime = 0.0
    pulled_at: UnixTime = 0.0
    """Time at which the last instance pulled the request."""
    submitted_at: UnixTime = 0.0
    """Begin of the last run."""
    first_token_at: UnixTime = 0.0
    """Time of the first token of all runs."""
    finished_at: UnixTime = 0.0
    prefill_s: Seconds = 0.0
    """
    Time of the prefill in the last run, if the first token is of this run and the engine reports
    the time; else 0.
    """
    predicted_wait: WaitForecast | None = None
    """Forecast, made at grouping, of the time from `grouped_at` to the begin of the first run."""
    instance_id: InstanceId | None = None
    """The last instance; None if no instance had the request."""
    attempts: Attempts = Attempts()
    late_tokens: int = 0
    max_tbt_s: Seconds = 0.0
    history: tuple[HistoryEntry, ...] = ()

    @property
    def is_late(self) -> bool:
        """True if the request missed a target, or ended at its end without its whole answer."""
        if self.outcome == COMPLETED:
            return not self.attained
        return self.outcome == DEADLINE_EXPIRED


def story_of(request: QueuedRequest) -> Story:
    """The record of *request*, with what is known before its end."""
    return Story(
        request_id=request.request_id,
        tenant=request.tenant,
        model=request.model.name,
        lane=request.lane,
        slo=request.slo,
        session=request.session,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.progress.num_tokens // request.num_answers,
        arrived_at=request.arrived_at,
        grouped_at=request.grouped_at,
        first_token_at=request.progress.first_token_at or 0.0,
        predicted_wait=request.predicted_wait,
        attempts=request.attempts,
        history=request.history,
    )


def ended(story: Story, *, outcome: str, at: UnixTime) -> Story:
    """Copy of *story* for a request that ended without its answer."""
    return msgspec.structs.replace(story, outcome=outcome, finished_at=at)


class PulledRequest(Value, frozen=True, kw_only=True):
    """A request that an instance holds since a time."""

    tenant: TenantId
    request_id: RequestId
    at: UnixTime


class RequeuedRequest(Value, frozen=True, kw_only=True):
    """A request that an instance has returned to a queue."""

    tenant: TenantId
    request_id: RequestId
    step: HistoryEntry
    """The last entry of its history."""


class StoriesObserved(
    Message, frozen=True, kw_only=True, omit_defaults=True, tag="stories.observed.v1"
):
    """
    Requests that an agent has pulled or returned, and those that an agent or grouper has ended,
    since its last message; a lost message is not repeated.
    """

    sender: str
    """Instance, or name of the grouper's process."""
    pulled: tuple[PulledRequest, ...] = ()
    requeued: tuple[RequeuedRequest, ...] = ()
    ended: tuple[Story, ...] = ()
