"""W3C's trace context in headers and queued requests."""

import pytest

from shared.contracts.base import Decoder, encode
from shared.contracts.requests import QueuedRequest
from shared.tracing.context import TraceContext, context_of, trace_of
from tests.queued import a_request
from tests.tracing.spans import SPAN_ID, TRACE, TRACE_ID, UNSAMPLED

decode: Decoder[QueuedRequest] = Decoder(QueuedRequest)


def test_context_is_read_from_the_headers_that_carry_it():
    assert trace_of(TRACE.headers) == TRACE
    assert trace_of(UNSAMPLED.headers) == UNSAMPLED
    assert (TRACE.is_sampled, UNSAMPLED.is_sampled) == (True, False)
    assert TRACE.trace_id == TRACE_ID


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00-ab",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-{'x' * 100}",
        7,
        None,
    ],
)
def test_invalid_context_is_ignored(traceparent: object):
    assert trace_of({"traceparent": traceparent, "tracestate": "vendor=1"}) is None


@pytest.mark.parametrize("tracestate", ["", "v=" + "x" * 512, 7])
def test_state_that_is_too_long_or_no_text_is_dropped_alone(tracestate: object):
    found = trace_of({"traceparent": TRACE.traceparent, "tracestate": tracestate})

    assert found == TraceContext(traceparent=TRACE.traceparent)


def test_flags_of_which_one_says_sampled_are_sampled():
    assert TraceContext(traceparent=f"00-{TRACE_ID}-{SPAN_ID}-03").is_sampled
    assert not TraceContext(traceparent=f"00-{TRACE_ID}-{SPAN_ID}-02").is_sampled


def test_queued_request_keeps_its_context():
    request = a_request("r", traceparent=TRACE.traceparent, tracestate=TRACE.tracestate)

    assert context_of(decode(encode(request))) == TRACE


def test_queued_request_without_a_context_has_no_field_of_it():
    request = a_request("r")

    assert context_of(request) is None
    assert b"trace" not in encode(request)


def test_context_of_an_earlier_version_that_is_invalid_is_not_sampled():
    trace = context_of(a_request("r", traceparent="00-ab"))

    assert trace is not None
    assert not trace.is_sampled
