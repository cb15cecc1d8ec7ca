"""Requests to pooling models in groupers."""

import json
from typing import Any

import msgspec
import pytest

from services.planner.grouper.intake import Intake
from services.planner.settings import GrouperSettings
from shared.api.calls import EMBEDDINGS
from shared.api.pooling import MAX_INPUTS, NO_SAMPLING
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import QueuedRequest, ReplyMode
from shared.models.registry import ModelRegistry
from solver.scheduling.window import tokens_needed
from tests.clocks import NOW
from tests.deliveries import LooseDelivery
from tests.unit.planner.rig import intake_of


@pytest.fixture
def intake() -> Intake:
    """The longest input has as many tokens as the model allows."""
    entries = (
        ModelEntry(name=ModelName("e"), path="", architecture="", max_model_len=16, task="embed"),
        ModelEntry(name=ModelName("g"), path="", architecture="", max_model_len=16),
        ModelEntry(
            name=ModelName("c"), path="", architecture="", max_model_len=16, task="classify"
        ),
        ModelEntry(name=ModelName("attached"), takes="bodies", max_model_len=16),
    )
    return intake_of(ModelRegistry(entries), GrouperSettings(trusted_users=("gateway",)))


def test_prompts_for_a_model_that_pools_are_refused(intake: Intake):
    body = msgspec.json.encode({"model": "e", "prompt": [10] * 4})
    with pytest.raises(ContractError) as refused:
        intake.accept(LooseDelivery(body=body, message_id="m1", user_id="gateway"), NOW)
    assert refused.value.code == "unsupported_task"


def called(
    intake: Intake,
    body: dict[str, Any],
    *,
    model: str = "e",
    endpoint: str = EMBEDDINGS,
    **fields: Any,
) -> QueuedRequest:
    """The request for a body in the form of HTTP, which any user may publish."""
    message = {"endpoint": endpoint, "body": {"model": model} | body} | fields
    delivery = LooseDelivery(
        body=json.dumps(message).encode(), message_id="m1", user_id="acme", reply_to="replies"
    )
    return intake.accept(delivery, NOW)


def test_call_for_embeddings_generates_nothing(intake: Intake):
    body = {"input": [[10] * 16, [11] * 4], "encoding_format": "base64"}
    request = called(intake, body, slo={"ttft_s": 1.5})

    assert request.call is not None
    assert json.loads(bytes(request.call.body)) == {"model": "e"} | body
    assert (request.pools, request.call.pools) == (True, True)
    assert (request.num_answers, request.sampling) == (1, NO_SAMPLING)
    assert (request.prompt_tokens, request.answer_tokens, tokens_needed(request)) == (20, 0, 20)
    assert (request.slo, request.reply_mode) == (Slo(ttlt_s=1.5), ReplyMode.FINAL)
    assert request.lane.endswith(".w0")


def test_predicted_length_of_inputs_is_at_most_what_the_model_reads(intake: Intake):
    texts = ["a" * 20, "a" * 20]

    assert called(intake, {"input": texts}).prompt_tokens == round(
        40 / intake.registry.entry(ModelName("e")).bytes_per_token
    )
    assert called(intake, {"input": ["a" * 4_000] * 2}).prompt_tokens == 2 * 16


def test_call_for_embeddings_may_have_the_most_inputs_of_one_request(intake: Intake):
    assert called(intake, {"input": [[10]] * MAX_INPUTS}).prompt_tokens == MAX_INPUTS


@pytest.mark.parametrize(
    ("body", "fields", "code", "param"),
    [
        ({"input": "a"}, {"model": "g"}, "unsupported_task", "model"),
        ({"input": "a"}, {"model": "c"}, "unsupported_task", "model"),
        ({"prompt": "a"}, {"endpoint": "/v1/completions"}, "unsupported_task", "model"),
        ({"input": "a"}, {"endpoint": "/v1/files"}, "unsupported_parameter", "endpoint"),
        ({"input": [[10]] * (MAX_INPUTS + 1)}, {}, "too_many_inputs", "input"),
        (
            {"input": "a", "encoding_format": "bytes"},
            {},
            "unsupported_parameter",
            "encoding_format",
        ),
    ],
    ids=["generates", "classifies", "text", "other endpoint", "too many", "bytes"],
)
def test_invalid_calls_are_refused_with_code_and_field(
    intake: Intake, body: dict[str, Any], fields: dict[str, Any], code: str, param: str
):
    with pytest.raises(ContractError) as refused:
        called(intake, body, **fields)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_calls_for_attached_servers_are_passed_as_they_are(intake: Intake):
    body = {"input": [[10]] * (MAX_INPUTS + 1), "encoding_format": "bytes"}
    request = called(intake, body, model="attached")

    assert request.call is not None
    assert json.loads(bytes(request.call.body)) == {"model": "attached"} | body
    assert not request.pools
