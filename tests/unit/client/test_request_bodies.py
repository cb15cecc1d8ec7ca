"""Fields that a program gives to the client become the body of a request, or a readable error."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shared.client.bodies import body_of, reply_mode
from shared.contracts.errors import ContractError
from shared.contracts.ingress import CallRequest, InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ChatMessage, ReplyMode


def test_fields_are_those_of_the_contract():
    body = body_of(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hello"}],
            "slo": {"ttft_s": 2},
            "stop": ["x"],
            "max_tokens": None,
        }
    )

    assert body == InferenceRequest(
        model="m",
        messages=(ChatMessage(role="user", content="hello"),),
        slo=Slo(ttft_s=2.0),
        stop=("x",),
    )


def test_a_call_keeps_the_body_of_its_endpoint():
    body = body_of({"endpoint": "/v1/completions", "body": {"model": "m", "prompt": ["a"]}})

    assert isinstance(body, CallRequest)
    assert msgspec.json.decode(body.body) == {"model": "m", "prompt": ["a"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "x"}, "invalid request: Object missing required field `model`"),
        ({"model": "m"}, "a request needs a prompt or messages"),
        ({"model": "m", "prompt": "x", "max_token": 3}, "did you mean 'max_tokens'?"),
        ({"model": "m", "prompt": "x", "n": 2}, "a request has no field 'n'"),
        ({"model": "m", "prompt": "x", "max_tokens": 0}, "at `$.max_tokens`"),
        ({"model": "m", "prompt": "x", "slo": {"ttft": 1}}, "has the fields ttft_s, tbt_s"),
        ({"model": "m", "prompt": "x", "slo": {"ttft": 1}}, "did you mean `ttft_s`?"),
        ({"model": "m", "prompt": object()}, "invalid request: "),
        ({"model": "m", "prompt": "a\udc80"}, "surrogates not allowed"),
        ({"endpoint": "/v1/completions", "body": {}, "top_p": 1}, "has no field 'top_p'"),
    ],
)
def test_an_invalid_field_is_named(fields: dict[str, Any], message: str):
    with pytest.raises(ContractError, match=re.escape(message)):
        body_of(fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "m", "prompt": "x"}, ReplyMode.STREAM),
        ({"model": "m", "prompt": "x", "reply": "final"}, ReplyMode.FINAL),
        ({"endpoint": "/v1/completions", "body": {}}, ReplyMode.FINAL),
        ({"endpoint": "/v1/completions", "body": {"stream": True}}, ReplyMode.STREAM),
        ({"endpoint": "/v1/completions", "body": {}, "reply": "stream"}, ReplyMode.STREAM),
    ],
)
def test_answers_are_streamed_by_default_and_calls_on_request(
    fields: dict[str, Any], expected: ReplyMode
):
    assert reply_mode(body_of(fields)) is expected


def test_the_body_of_a_call_is_an_object():
    with pytest.raises(ContractError, match="invalid body"):
        reply_mode(body_of({"endpoint": "/v1/completions", "body": []}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (lambda value: {"prompt": "a", "ttl_s": value}, "ttl_s"),
        (lambda value: {"prompt": "a", "temperature": value}, "temperature"),
        (lambda value: {"prompt": "a", "slo": {"ttft_s": value}}, "slo.ttft_s"),
        (
            lambda value: {"endpoint": "/v1/completions", "body": {"logit_bias": [{"a": value}]}},
            "body.logit_bias[0].a",
        ),
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    fields: Callable[[float], dict[str, Any]], param: str, value: float
):
    with pytest.raises(ContractError, match="must be a finite number") as refused:
        body_of({"model": "m", **fields(value)})
    assert refused.value.param == param
