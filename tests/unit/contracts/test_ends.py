"""The nearest of a request's ends counts, and a request without an end never ends."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import Decoder, encode
from shared.contracts.ends import (
    COMPLETION,
    EXPIRES_AT,
    FIRST_TOKEN,
    NEVER,
    accepted_ends,
    effective_ends,
    end_at,
    expiration_s,
    expired_error,
    nearest_end,
)
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import MAX_TARGET_S, OnLate, QosClass, Slo
from shared.contracts.requests import Progress, QueuedRequest
from tests.clocks import NOW
from tests.queued import BATCH, BEST_EFFORT, CHAT, a_request

SLOS = st.sampled_from((CHAT, BATCH, BEST_EFFORT, Slo(ttft_s=1.0, ttlt_s=9.0)))
TIMES = st.none() | st.floats(-5.0, 50.0).map(lambda seconds: NOW + seconds)


def body(**fields: object) -> InferenceRequest:
    return InferenceRequest(**({"model": "m", "prompt": "p"} | fields))


@pytest.mark.parametrize(
    ("slo", "begun", "end"),
    [
        (CHAT, False, (NOW + 5.0, FIRST_TOKEN)),
        (CHAT, True, NEVER),
        (BATCH, False, (NOW + 100.0, COMPLETION)),
        (BATCH, True, (NOW + 100.0, COMPLETION)),
        (Slo(deadline_at=NOW + 7.0), False, (NOW + 7.0, COMPLETION)),
        (BEST_EFFORT, False, NEVER),
    ],
)
def test_late_requests_are_dropped_at_the_deadline_of_their_class(
    slo: Slo, begun: object, end: tuple[float, str]
):
    request = a_request(slo=slo, on_late=OnLate.DROP)

    assert nearest_end(request, has_begun=bool(begun)) == end
    assert nearest_end(a_request(slo=slo), has_begun=bool(begun)) == NEVER


def test_expiry_ends_a_request_with_tokens():
    request = a_request(expires_at=NOW + 3.0, on_late=OnLate.DROP)

    assert nearest_end(request, has_begun=True) == (NOW + 3.0, EXPIRES_AT)
    assert nearest_end(request) == (NOW + 3.0, EXPIRES_AT)


@pytest.mark.parametrize(
    "progress", [Progress(first_token_at=NOW), Progress(children=(Progress(first_token_at=NOW),))]
)
def test_tokens_of_earlier_runs_count(progress: Progress):
    request = a_request(slo=CHAT, on_late=OnLate.DROP, progress=progress)

    assert end_at(request) == math.inf


@given(SLOS, TIMES, st.sampled_from(OnLate), st.booleans())
def test_nearest_end_is_the_least_of_all(
    slo: Slo, expires_at: float | None, on_late: OnLate, begun: object
):
    has_begun = bool(begun)
    request = a_request(slo=slo, expires_at=expires_at, on_late=on_late)
    ends = [math.inf if expires_at is None else expires_at]
    if on_late is OnLate.DROP and slo.qos_class is QosClass.NON_INTERACTIVE:
        ends.append(slo.completion_deadline_at(NOW))
    if on_late is OnLate.DROP and slo.qos_class is QosClass.INTERACTIVE and not has_begun:
        ends.append(slo.first_token_deadline_at(NOW))

    assert nearest_end(request, has_begun=has_begun).at == min(ends)


@given(SLOS, st.booleans())
def test_request_without_an_end_never_ends(slo: Slo, begun: object):
    request = a_request(slo=slo)

    assert nearest_end(request, has_begun=bool(begun)) == NEVER
    assert expiration_s(request, NOW) is None


def test_lifetime_of_a_message_is_the_rest_of_the_time():
    request = a_request(expires_at=NOW + 3.0)

    assert expiration_s(request, NOW + 1.0) == pytest.approx(2.0)
    assert expiration_s(request, NOW + 4.0) == 0.0


@pytest.mark.parametrize(
    ("fields", "expiration", "expires_at"),
    [
        ({}, None, None),
        ({"expires_at": NOW + 9.0, "ttl_s": 4.0}, None, NOW + 4.0),
        ({"expires_at": NOW + 9.0, "ttl_s": 40.0}, 20.0, NOW + 9.0),
        ({"ttl_s": 40.0}, 20.0, NOW + 20.0),
        ({"ttl_s": 4.0, "not_before": NOW + 10.0}, None, NOW + 14.0),
        ({"ttl_s": 4.0, "not_before": NOW - 10.0}, None, NOW + 4.0),
    ],
)
def test_nearest_requested_end_counts(
    fields: dict[str, float], expiration: float | None, expires_at: float | None
):
    ends = effective_ends(body(**fields), arrived_at=NOW, now=NOW, expiration_s=expiration)

    assert ends.expires_at == expires_at


def test_time_in_the_past_holds_nothing():
    assert effective_ends(body(not_before=NOW), arrived_at=NOW, now=NOW).not_before is None
    ends = effective_ends(body(not_before=NOW + 1.0), arrived_at=NOW, now=NOW)
    assert ends.not_before == NOW + 1.0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"expires_at": NOW + MAX_TARGET_S + 1.0}, "expires_at"),
        ({"not_before": math.inf}, "not_before"),
        ({"not_before": NOW + 5.0, "expires_at": NOW + 4.0}, "not_before"),
    ],
)
def test_impossible_ends_are_refused(fields: dict[str, float], param: str):
    with pytest.raises(ContractError) as refused:
        effective_ends(body(**fields), arrived_at=NOW, now=NOW)

    assert (refused.value.param, refused.value.status) == (param, 400)


def test_end_in_the_past_is_refused_as_expired():
    with pytest.raises(ContractError) as refused:
        accepted_ends(body(expires_at=NOW - 1.0), now=NOW)

    assert (refused.value.code, refused.value.status) == ("deadline_expired", 504)


def test_error_names_the_end_and_the_place():
    request = a_request(expires_at=NOW + 3.0)
    error = expired_error(
        nearest_end(request), arrived_at=request.arrived_at, place="it waited somewhere"
    )

    assert (error.code, error.type, error.status, error.param) == (
        "deadline_expired",
        "timeout_error",
        504,
        "expires_at",
    )
    assert "time of expiry, 3.000 s after its arrival: it waited somewhere" in error.message


def test_requests_without_ends_keep_their_bytes():
    """Peers of older versions read and write the same bytes."""
    decode: Decoder[QueuedRequest] = Decoder(QueuedRequest)
    raw = encode(a_request("r"))

    assert b"expires_at" not in raw
    assert b"on_late" not in raw
    assert decode(raw).on_late is OnLate.SERVE
    with_end = a_request("r", expires_at=NOW, on_late=OnLate.DROP)
    assert decode(encode(with_end)) == with_end
    assert b'"on_late":"drop"' in encode(with_end)


def test_unknown_policy_is_refused():
    with pytest.raises(msgspec.ValidationError, match="on_late"):
        msgspec.json.decode(b'{"model":"m","on_late":"never"}', type=InferenceRequest)
