"""Requests in the form of HTTP become calls, or are refused with the invalid field."""

import json
from typing import Any

import pytest

from services.planner.grouper.intake import Intake
from services.planner.settings import GrouperSettings
from shared.api.calls import MOST_TOKEN_BYTES
from shared.contracts.errors import ContractError
from shared.contracts.qos import Importance, OnLate, Slo
from shared.contracts.requests import QueuedRequest, ReplyMode
from shared.models.registry import ModelRegistry
from tests.clocks import NOW
from tests.deliveries import LooseDelivery
from tests.queued import MODEL
from tests.unit.planner.rig import intake_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "a" * 400}]
BODY = {"model": MODEL, "messages": MESSAGES}
IDS = {"model": MODEL, "prompt": [10, 11, 12]}


@pytest.fixture
def intake(registry: ModelRegistry) -> Intake:
    return intake_of(registry, GrouperSettings(trusted_users=("gateway",)))


def accepted(
    intake: Intake, body: Any, endpoint: str = CHAT, *, user: str = "acme", **fields: Any
) -> QueuedRequest:
    message = json.dumps({"endpoint": endpoint, "body": body} | fields).encode()
    return intake.accept(LooseDelivery(body=message, message_id="m1", user_id=user), NOW)


def test_body_reaches_the_engine_host_as_it_is_without_the_fields_of_the_mesh(intake: Intake):
    own = {"slo": {"ttft_s": 1}, "application": "a", "priority": 2}
    seed = 123456789012345678901234567890
    request = accepted(intake, BODY | own | {"temperature": 1e-7, "seed": seed})

    assert request.call is not None
    assert json.loads(bytes(request.call.body)) == BODY | {"temperature": 1e-7, "seed": seed}
    assert (request.call.endpoint, request.prompt, request.messages) == (CHAT, None, None)
    assert (request.slo.ttft_s, request.application, request.priority) == (1.0, "a", -2)


def test_texts_that_cannot_fit_into_the_context_are_refused(
    intake: Intake, registry: ModelRegistry
):
    """Only an engine host counts the tokens; far too long texts need not wait for one."""
    context = registry.entry(MODEL).max_model_len
    long = "a" * (MOST_TOKEN_BYTES * context + 1)
    with pytest.raises(ContractError) as refused:
        accepted(intake, {"model": MODEL, "messages": [{"role": "user", "content": long}]})

    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "body")
    for fields in (
        {"messages": [{"role": "user", "content": long[:-1]}]},
        {"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": 64},
    ):
        assert accepted(intake, {"model": MODEL} | fields).call is not None


def test_fields_beside_the_body_have_precedence(intake: Intake):
    inside = {"slo": {"ttft_s": 1}, "importance": "low", "application": "a"}
    outside = {"slo": {"ttlt_s": 9}, "importance": "high", "application": "b", "priority": 3}
    request = accepted(intake, BODY | inside, **outside)

    assert (request.slo, request.importance) == (Slo(ttlt_s=9.0), Importance.HIGH)
    assert (request.application, request.priority) == ("b", 3)


def test_session_is_kept_with_the_request(intake: Intake):
    named = [
        {"session_id": "s1"},
        {"vllm_xargs": {"agentic_context": {"program_id": "s1", "priority": 2}}},
        {"session_id": {"odd": 1}, "vllm_xargs": {"agentic_context": {"session": "s1"}}},
    ]
    assert [accepted(intake, BODY | fields).session for fields in named] == ["s1"] * 3
    assert accepted(intake, BODY | named[0], session="s2").session == "s2"
    assert accepted(intake, BODY | {"session_id": 7, "vllm_xargs": {}}).session is None


def test_ends_are_fields_of_the_mesh_inside_and_beside_the_body(intake: Intake):
    inside = {"ttl_s": 9.0, "expires_at": NOW + 99.0, "not_before": NOW + 1.0, "on_late": "drop"}
    request = accepted(intake, BODY | inside)

    assert request.call is not None
    assert json.loads(bytes(request.call.body)) == BODY
    assert (request.arrived_at, request.expires_at) == (NOW + 1.0, NOW + 10.0)
    assert request.on_late is OnLate.DROP

    outside = {"ttl_s": 5.0, "not_before": NOW + 2.0, "on_late": "serve"}
    beside = accepted(intake, BODY | inside, **outside)
    assert (beside.expires_at, beside.on_late) == (NOW + 7.0, OnLate.SERVE)


def test_model_beside_the_body_is_the_default(intake: Intake):
    request = accepted(intake, {"messages": MESSAGES}, model=MODEL)

    assert request.call is not None
    assert json.loads(bytes(request.call.body))["model"] == request.model.name == MODEL


def test_tenant_and_arrival_are_of_trusted_publishers_only(intake: Intake):
    claims = {"tenant": "claimed", "arrived_at": NOW - 3.0}

    assert accepted(intake, BODY, **claims).tenant == "acme"
    trusted = accepted(intake, BODY, user="gateway", **claims)
    assert (trusted.tenant, trusted.arrived_at) == ("claimed", NOW - 3.0)


@pytest.mark.parametrize(
    ("body", "fields", "mode", "deltas"),
    [
        (BODY, {}, ReplyMode.FINAL, False),
        (BODY | {"stream": True}, {}, ReplyMode.STREAM, True),
        (BODY | {"stream": True}, {"reply": "final"}, ReplyMode.FINAL, True),
        (BODY, {"reply": "stream"}, ReplyMode.STREAM, False),
    ],
)
def test_streams_have_text_if_the_body_asks_for_a_stream(
    intake: Intake,
    body: dict[str, Any],
    fields: dict[str, Any],
    mode: ReplyMode,
    *,
    deltas: bool,
):
    request = accepted(intake, body | {"stream_options": None}, **fields)

    assert request.call is not None
    assert (request.reply_mode, request.call.deltas) == (mode, deltas)
    assert "stream" not in json.loads(bytes(request.call.body))


def test_prompt_length_is_estimated_from_bytes(intake: Intake, registry: ModelRegistry):
    per_token = registry.entry(MODEL).bytes_per_token
    tools = [{"type": "function", "function": {"name": "pick", "parameters": {}}}]
    plain = accepted(intake, BODY).prompt_tokens
    parts = [{"type": "text", "text": "a" * 400}, {"type": "image_url", "image_url": "data:" * 999}]

    assert plain == round(400 / per_token)
    assert accepted(intake, {"model": MODEL, "messages": [{"content": parts}]}).prompt_tokens == (
        plain
    )
    assert accepted(intake, BODY | {"tools": tools}).prompt_tokens > plain
    responses = {"model": MODEL, "input": "a" * 200, "instructions": "b" * 200}
    assert accepted(intake, responses, "/v1/responses").prompt_tokens == plain


@pytest.mark.parametrize(
    ("body", "prompt_tokens", "answers", "limit"),
    [
        (IDS, 3, 1, 16),
        (IDS | {"max_tokens": 5, "n": 3}, 3, 3, 15),
        (IDS | {"prompt": [[10, 11], [12]], "n": 2, "max_tokens": 5}, 3, 4, 20),
        (IDS | {"prompt": ["a" * 40, "b" * 40], "max_tokens": 5}, None, 2, 10),
        (IDS | {"max_tokens": None, "n": None}, 3, 1, 16),
    ],
)
def test_answers_of_one_call_are_counted_together(
    intake: Intake, body: dict[str, Any], prompt_tokens: int | None, answers: int, limit: int
):
    request = accepted(intake, body, COMPLETIONS)

    assert request.num_answers == answers
    assert request.sampling.max_tokens == request.answer_tokens == limit
    assert prompt_tokens in (request.prompt_tokens, None)


def test_a_chat_without_a_limit_may_fill_the_context_but_is_not_expected_to(
    intake: Intake, registry: ModelRegistry
):
    request = accepted(intake, BODY)
    room = registry.entry(MODEL).max_model_len - request.prompt_tokens

    assert request.sampling.max_tokens == room
    assert request.answer_tokens < room


def test_random_answers_get_their_seed_at_ingress(intake: Intake):
    assert accepted(intake, BODY).sampling.seed is not None


@pytest.mark.parametrize(
    ("body", "endpoint", "fields", "param"),
    [
        (BODY, "/v1/embeddings", {}, "model"),
        (BODY, "/v1/files", {}, "endpoint"),
        ([], CHAT, {}, None),
        ({"messages": MESSAGES}, CHAT, {}, "model"),
        (BODY | {"model": "none"}, CHAT, {}, "model"),
        (BODY | {"model": 3}, CHAT, {}, "model"),
        (BODY, CHAT, {"temperature": 0}, "temperature"),
        (BODY, CHAT, {"messages": MESSAGES}, "messages"),
        (BODY, CHAT, {"tools": []}, "tools"),
        (BODY | {"kv_transfer_params": {"a": 1}}, CHAT, {}, "kv_transfer_params"),
        (BODY | {"use_beam_search": True}, CHAT, {}, "use_beam_search"),
        (BODY | {"tools": ["x" * 200_000]}, CHAT, {}, "tools"),
        (BODY | {"slo": {"ttft_s": 1e-9}}, CHAT, {}, "slo.ttft_s"),
        (BODY | {"slo": {"ttft": 1}}, CHAT, {}, "slo"),
        (BODY | {"stream": "yes"}, CHAT, {}, "stream"),
        (BODY | {"priority": 10**6}, CHAT, {}, "priority"),
        (IDS | {"n": 10**6}, COMPLETIONS, {}, "n"),
        (IDS | {"prompt": ["x"] * 200}, COMPLETIONS, {}, "prompt"),
    ],
)
def test_call_is_refused_with_the_invalid_field(
    intake: Intake, body: Any, endpoint: str, fields: dict[str, Any], param: str | None
):
    with pytest.raises(ContractError) as refused:
        accepted(intake, body, endpoint, **fields)

    assert refused.value.param == param


def test_fields_of_vllm_are_left_to_vllm(intake: Intake):
    body = BODY | {"logit_bias": "hot", "tools": 3}
    request = accepted(intake, body)

    assert request.call is not None
    assert json.loads(bytes(request.call.body)) == body


def test_fields_out_of_their_range_are_refused_as_over_http(intake: Intake):
    with pytest.raises(ContractError) as refused:
        accepted(intake, BODY | {"temperature": "hot"})

    assert refused.value.param == "body.temperature"


ITEM = {"id": "job", "deadline": NOW + 60, "endpoint": CHAT, "payload": BODY | {"tools": [{}]}}


def item_accepted(registry: ModelRegistry, item: dict[str, Any], *, calls: bool) -> QueuedRequest:
    intake = intake_of(registry, GrouperSettings(calls_of_items=calls))
    return intake.accept(LooseDelivery(body=json.dumps(item).encode()), NOW)


def test_items_of_llm_d_are_calls_where_all_engines_are_vllm(registry: ModelRegistry):
    request = item_accepted(registry, ITEM, calls=True)

    assert request.call is not None
    assert json.loads(bytes(request.call.body)) == ITEM["payload"]
    assert (request.request_id, request.reply_mode) == ("job", ReplyMode.FINAL)
    assert request.slo.deadline_at == NOW + 60


def test_items_of_llm_d_are_text_elsewhere_or_for_other_endpoints(registry: ModelRegistry):
    with pytest.raises(ContractError) as refused:
        item_accepted(registry, ITEM, calls=False)
    text = ITEM | {"payload": BODY, "endpoint": "/v1/other"}

    assert refused.value.param == "tools"
    assert item_accepted(registry, text, calls=True).call is None
