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
    check_generates,
)
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError
from shared.contracts.models import ModelEntry
from shared.contracts.qos import QosClass, Slo
from shared.contracts.requests import ApiCall

EMBEDDER = ModelEntry(name=ModelName("e"), path="", architecture="", max_model_len=16, task="embed")
GENERATOR = ModelEntry(name=ModelName("g"), path="", architecture="", max_model_len=16)
CLASSIFIER = msgspec.structs.replace(EMBEDDER, name=ModelName("c"), task="classify")
CHAT = "/v1/chat/completions"


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


def test_models_that_pool_answer_no_prompts() -> None:
    check_generates(GENERATOR)
    with pytest.raises(ContractError, match=r"task is embed.*/v1/embeddings"):
        check_generates(EMBEDDER)


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
