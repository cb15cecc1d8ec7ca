"""
Ends: times at which a request without its whole answer ends as failed, wherever it is.

A request has up to three ends: `expires_at`, which ends the whole answer; with `on_late: drop`, the
deadline of its completion if it is not interactive; and, with `on_late: drop`, the deadline of the
first token if it is interactive and has no token. The nearest one counts.
"""

from math import inf
from typing import NamedTuple, Protocol

from shared.contracts.base import Seconds, UnixTime, Value
from shared.contracts.errors import ContractError
from shared.contracts.qos import MAX_TARGET_S, OnLate, QosClass
from shared.contracts.requests import ErrorInfo, QueuedRequest

DEADLINE_EXPIRED = "deadline_expired"
EXPIRES_AT, FIRST_TOKEN, COMPLETION = "expires_at", "slo.ttft_s", "slo.ttlt_s"
"""Field that names the end of a request in its error."""


class AskedEnds(Protocol):
    """Fields of a body from which ends are computed."""

    @property
    def expires_at(self) -> float | None: ...

    @property
    def ttl_s(self) -> Seconds | None: ...

    @property
    def not_before(self) -> float | None: ...

    @property
    def on_late(self) -> OnLate | None: ...


class Ends(Value, frozen=True, kw_only=True):
    """Checked ends of one request."""

    expires_at: UnixTime | None = None
    not_before: UnixTime | None = None
    """Set if the request must be held; None if the time has passed."""
    on_late: OnLate | None = None


def effective_ends(
    body: AskedEnds, *, arrived_at: UnixTime, now: UnixTime, expiration_s: Seconds | None = None
) -> Ends:
    """
    The ends that *body* requests; an end that has passed is not an error here.

    Args:
        body: Fields of the request.
        arrived_at: Time from which `ttl_s` and *expiration_s* count.
        now: Unix seconds.
        expiration_s: Lifetime of the message that brought the request, AMQP's `expiration`.

    Raises:
        ContractError: A time is too far ahead, or the request ends before it may begin.
    """
    for name, at in (("expires_at", body.expires_at), ("not_before", body.not_before)):
        if at is not None and not at <= now + MAX_TARGET_S:
            raise ContractError(
                f"{name} is {at:.12g}; it must be a Unix time in seconds, at most "
                f"{MAX_TARGET_S / 86400:g} days ahead",
                param=name,
            )
    begins_at = arrived_at if body.not_before is None else max(arrived_at, body.not_before)
    ends = [
        at
        for at in (
            body.expires_at,
            None if body.ttl_s is None else begins_at + body.ttl_s,
            None if expiration_s is None else arrived_at + expiration_s,
        )
        if at is not None
    ]
    expires_at = min(ends, default=None)
    is_held = begins_at > now
    if is_held and expires_at is not None and expires_at <= begins_at:
        raise ContractError(
            f"the request ends {begins_at - expires_at:.3f} s before not_before", param="not_before"
        )
    return Ends(
        expires_at=expires_at,
        not_before=begins_at if is_held else None,
        on_late=body.on_late,
    )


class End(NamedTuple):
    """One end of a request."""

    at: UnixTime
    """Unix seconds; infinite if the request never ends."""
    param: str
    """Field that sets the end."""


NEVER = End(inf, EXPIRES_AT)


def nearest_end(request: QueuedRequest, *, has_begun: bool | None = None) -> End:
    """
    The end of a request whose answer is not complete.

    Args:
        request: The request.
        has_begun: True if it has a token; None: as its progress says.
    """
    if has_begun is None:
        has_begun = has_token(request)
    end = end_with_tokens(request)
    return end if has_begun else min(end, end_without_token(request))


def end_at(request: QueuedRequest) -> UnixTime:
    """Time at which a waiting request ends; infinite if it never does."""
    return nearest_end(request).at


def end_with_tokens(request: QueuedRequest) -> End:
    """The end of a request whether or not it has a token."""
    end = NEVER if request.expires_at is None else End(request.expires_at, EXPIRES_AT)
    slo = request.slo
    if request.on_late is OnLate.SERVE or slo.qos_class is not QosClass.NON_INTERACTIVE:
        return end
    return min(end, End(slo.completion_deadline_at(request.arrived_at), COMPLETION))


def end_without_token(request: QueuedRequest) -> End:
    """The end that a request has only until its first token."""
    if request.on_late is OnLate.SERVE or request.slo.qos_class is not QosClass.INTERACTIVE:
        return NEVER
    return End(request.slo.first_token_deadline_at(request.arrived_at), FIRST_TOKEN)


def has_token(request: QueuedRequest) -> bool:
    """Return whether earlier runs have begun the answer."""
    progress = request.progress
    return progress.first_token_at is not None or any(
        child.first_token_at is not None for child in progress.children
    )


def expiration_s(request: QueuedRequest, now: UnixTime) -> Seconds | None:
    """Lifetime of a message with the request that is published now; None without an end."""
    at = end_at(request)
    return None if at == inf else max(0.0, at - now)


def expired_error(end: End, *, arrived_at: UnixTime, place: str) -> ErrorInfo:
    """
    The error of a request that has reached its end.

    Args:
        end: The end.
        arrived_at: Time of the request's arrival.
        place: How far the request came, as the end of a sentence.
    """
    after_s = max(0.0, end.at - arrived_at)
    return ErrorInfo(
        message=f"the request ended without its whole answer at its {_NAMES[end.param]}, "
        f"{after_s:.3f} s after its arrival: {place}",
        type="timeout_error",
        code=DEADLINE_EXPIRED,
        param=end.param,
        status=504,
    )


_NAMES = {
    EXPIRES_AT: "time of expiry",
    FIRST_TOKEN: "first-token deadline",
    COMPLETION: "completion deadline",
}


def accepted_ends(body: AskedEnds, *, now: UnixTime) -> Ends:
    """
    The ends of a request that arrives now.

    Raises:
        ContractError: A time is too far ahead, the request ends before it may begin, or its end has
            passed (status 504).
    """
    ends = effective_ends(body, arrived_at=now, now=now)
    if ends.expires_at is not None and ends.expires_at <= now:
        raise ContractError(
            f"the request ended {now - ends.expires_at:.3f} s before it arrived",
            code=DEADLINE_EXPIRED,
            param=EXPIRES_AT,
            status=504,
        )
    return ends
