"""Requests to pooling models: their targets, and refusals."""

from typing import Any

import pytest

from shared.api.pooling import MAX_INPUTS, check_inputs, check_task
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.models import ModelEntry
from shared.contracts.qos import QosClass, Slo

EMBEDDER = ModelEntry(name=ModelName("e"), path="", architecture="", max_model_len=16, task="embed")
GENERATOR = ModelEntry(name=ModelName("g"), path="", architecture="", max_model_len=16)


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
