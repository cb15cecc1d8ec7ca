"""Requests for models whose servers read bodies."""

import json
from typing import Any

import pytest

from services.planner.grouper.intake import Intake
from services.planner.settings import GrouperSettings
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import QueuedRequest, ReplyMode
from shared.models.registry import ModelRegistry
from tests.clocks import NOW
from tests.deliveries import LooseDelivery
from tests.unit.planner.rig import intake_of

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def intake() -> Intake:
    entry = ModelEntry(name=ModelName("m"), takes="bodies", max_model_len=512)
    return intake_of(ModelRegistry([entry]), GrouperSettings())


def accepted(intake: Intake, **body: Any) -> QueuedRequest:
    message = json.dumps({"model": "m"} | body).encode()
    return intake.accept(LooseDelivery(body=message, message_id="m1"), NOW)


def body_of(request: QueuedRequest) -> Any:
    assert request.call is not None
    return json.loads(bytes(request.call.body))


def test_messages_become_a_body_with_the_parameters_that_were_set(intake: Intake) -> None:
    request = accepted(
        intake, messages=MESSAGES, max_completion_tokens=9, temperature=0.0, slo={"ttft_s": 2}
    )

    assert request.call is not None
    assert (request.call.endpoint, request.call.plain, request.call.deltas) == (CHAT, True, True)
    assert body_of(request) == {
        "model": "m",
        "messages": MESSAGES,
        "max_tokens": 9,
        "temperature": 0.0,
    }
    assert (request.messages, request.prompt) == (None, None)
    assert (request.sampling.max_tokens, request.slo.ttft_s) == (9, 2)


def test_prompt_becomes_a_completion_with_the_default_limit(intake: Intake) -> None:
    request = accepted(intake, prompt=[1, 2, 3], reply="final")

    assert request.call is not None
    assert (request.call.endpoint, request.call.deltas) == ("/v1/completions", False)
    assert body_of(request) == {"model": "m", "prompt": [1, 2, 3], "max_tokens": 128}
    assert (request.prompt_tokens, request.reply_mode) == (3, ReplyMode.FINAL)


def test_call_keeps_its_body_and_the_options_of_its_stream(intake: Intake) -> None:
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    options = {"include_usage": True}
    request = accepted(intake, endpoint=CHAT, body=body | {"stream_options": options})

    assert request.call is not None
    assert (request.call.plain, request.call.deltas) == (False, True)
    assert json.loads(bytes(request.call.stream_options or b"")) == options
    assert body_of(request) == {"model": "m", "messages": MESSAGES}


def test_request_without_a_prompt_is_refused(intake: Intake) -> None:
    with pytest.raises(ContractError, match="prompt"):
        accepted(intake, max_tokens=3)
