"""Requests to pooling models: their targets, and refusals."""

import json
from typing import Any

import msgspec
import pytest

from shared.api.calls import EMBEDDINGS
from shared.api.pooling import (
    MAX_INPUTS,
    check_call_inputs,
    check_call_task,
    check_inputs,
    check_task,
)
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.models import ModelEntry
from shared.contracts.qos import QosClass, Slo
from shared.contracts.requests import ApiCall

EMBEDDER = ModelEntry(name=ModelName("e"), path="", architecture="", max_model_len=16, task="embed")
GENERATOR = ModelEntry(name=ModelName("g"), path="", architecture="", max_model_len=16)
CLASSIFIER = msgspec.structs.replace(EMBEDDER, name=ModelName("c"), task="classify")
CHAT = "/v1/chat/completions"


def body(*lengths: int, **fields: Any) -> InferenceRequest:
    values = {"model": "e", "prompt": (7,) * sum(lengths), "input_lengths": lengths}
    return InferenceRequest(**(values | fields))


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        (Slo(ttft_s=1.0, tbt_s=0.1), Slo(ttlt_s=1.0)),
        (Slo(ttft_s=1.0, ttlt_s=5.0), Slo(ttlt_s=1.0)),
        (Slo(ttlt_s=5.0, deadline_at=9.0), Slo(ttlt_s=5.0, deadline_at=9.0)),
        (Slo(), Slo()),
    ],
)
def test_time_to_the_first_token_is_that_of_the_whole_answer(slo: Slo, expected: Slo) -> None:
    assert slo.at_once == expected
    assert slo.at_once.qos_class is not QosClass.INTERACTIVE


def test_models_serve_requests_of_their_task_only() -> None:
    check_task(body(3), EMBEDDER)
    check_task(body(), GENERATOR)
    with pytest.raises(ContractError, match=r"task is embed.*/v1/embeddings"):
        check_task(body(), EMBEDDER)
    with pytest.raises(ContractError, match="pools no inputs"):
        check_task(body(3), GENERATOR)


@pytest.mark.parametrize(
    ("endpoint", "entry", "message"),
    [
        (EMBEDDINGS, EMBEDDER, None),
        (CHAT, GENERATOR, None),
        (EMBEDDINGS, GENERATOR, "g makes no embeddings, since its task is generate"),
        (EMBEDDINGS, CLASSIFIER, "c makes no embeddings, since its task is classify"),
        (CHAT, EMBEDDER, "e generates no text, since its task is embed"),
        (CHAT, CLASSIFIER, "c generates no text, since its task is classify"),
    ],
)
def test_calls_are_served_by_models_of_their_task_only(
    endpoint: str, entry: ModelEntry, message: str | None
) -> None:
    if message is None:
        check_call_task(endpoint, entry)
        return
    with pytest.raises(ContractError, match=message) as refused:
        check_call_task(endpoint, entry, param="body.model")
    assert (refused.value.code, refused.value.param) == ("unsupported_task", "body.model")


@pytest.mark.parametrize(
    ("encoding", "num_inputs", "code", "param"),
    [
        (None, MAX_INPUTS, None, None),
        ("float", 1, None, None),
        ("base64", 1, None, None),
        ("none", 1, None, None),
        (["bytes"], 1, None, None),
        ("bytes", 1, "unsupported_parameter", "encoding_format"),
        ("bytes_only", 1, "unsupported_parameter", "encoding_format"),
        (None, MAX_INPUTS + 1, "too_many_inputs", "input"),
    ],
)
def test_calls_have_limited_inputs_and_a_response_in_json(
    encoding: Any, num_inputs: int, code: str | None, param: str | None
) -> None:
    """vLLM's application refuses unknown encodings."""
    body = {"model": "e", "input": "a", "encoding_format": encoding}
    call = ApiCall(endpoint=EMBEDDINGS, body=msgspec.Raw(json.dumps(body).encode()))
    if code is None:
        check_call_inputs(call, num_inputs)
        return
    with pytest.raises(ContractError) as refused:
        check_call_inputs(call, num_inputs)
    assert (refused.value.code, refused.value.param, refused.value.status) == (code, param, 400)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (body(16, 16), None),
        (body(17), "context_length_exceeded"),
        (body(2, 0), "invalid_request"),
        (body(2, prompt=(7,)), "invalid_request"),
        (body(2, prompt="ab"), "invalid_request"),
        (body(*[1] * MAX_INPUTS), None),
        (body(*[1] * (MAX_INPUTS + 1)), "too_many_inputs"),
    ],
    ids=lambda value: "" if isinstance(value, InferenceRequest) else str(value),
)
def test_inputs_have_limits_and_agree_with_the_prompt(
    request_: InferenceRequest, code: str | None
) -> None:
    if code is None:
        check_inputs(request_, EMBEDDER)
        return
    with pytest.raises(ContractError) as refused:
        check_inputs(request_, EMBEDDER)
    assert (refused.value.code, refused.value.status) == (code, 400)
