"""The answer in the object of a stored request."""

import json

import msgspec
import pytest

from services.gateway.requests.objects import result_of
from shared.contracts.ingress import CallRequest
from tests.integration.gateway_rig import completed
from tests.queued import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def body_for(endpoint: str, *, events: bool) -> CallRequest:
    body = msgspec.Raw(b'{"model":"m"}')
    return CallRequest(endpoint=endpoint, body=body, model=MODEL, events=events)


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_answer_that_was_streamed_is_the_response_of_its_events(endpoint: str):
    streamed = json.loads(result_of(completed(body_for(endpoint, events=True), "a", "b"), endpoint))
    whole = json.loads(result_of(completed(body_for(endpoint, events=False), "a", "b"), endpoint))

    assert streamed["choices"] == whole["choices"]
    assert '"ab"' in json.dumps(streamed["choices"])
    assert streamed["headway"]["engine"] == "fake"


def test_without_an_endpoint_the_final_is_the_answer():
    final = completed(body_for(COMPLETIONS, events=True), "a")
    found = json.loads(result_of(msgspec.structs.replace(final, response=msgspec.UNSET), None))

    assert found["kind"] == "request.completed.v1"
