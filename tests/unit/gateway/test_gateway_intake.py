"""Form of accepted requests, and errors of refused requests."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.errors import error_info
from services.gateway.headers import IMPORTANCE, PRIORITY, PRIORITY_LOWER_FIRST
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError, ModelNotReadyError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.models import TrafficSplit
from shared.contracts.qos import Importance, OnLate, Slo
from tests.unit.gateway.rig import CHAT, COMPLETION, MODEL, NOW, SEED, IntakeRig


def test_accepted_request_is_stamped_and_tokenized(intake_rig: IntakeRig):
    accepted = intake_rig.completion(max_tokens=7, temperature=0, slo={"ttft_s": 1.5})
    tokenizer = next(iter(intake_rig.tokenizers.values()))
    tokens = tokenizer.encode("hello there")

    assert accepted.ingress == InferenceRequest(
        model=MODEL,
        prompt=tokens,
        prompt_tokens=len(tokens),
        max_tokens=7,
        temperature=0,
        id="req-1",
        tenant="acme",
        arrived_at=NOW,
        slo=Slo(ttft_s=1.5),
        importance=Importance.HIGH,
    )
    assert not accepted.stream


def test_chat_is_tokenized_through_the_template(intake_rig: IntakeRig):
    accepted = intake_rig.chat(stream=True, stream_options={"include_usage": True})

    prompt = accepted.ingress.prompt
    assert isinstance(prompt, tuple)
    assert accepted.ingress.prompt_tokens == len(prompt)
    assert accepted.ingress.messages is None
    assert (accepted.stream, accepted.include_usage) == (True, True)


def test_published_form_satisfies_its_own_schema(intake_rig: IntakeRig):
    ingress = intake_rig.chat(stop=["x"], seed=3, service_tier="flex").ingress

    decoded = msgspec.json.decode(msgspec.json.encode(ingress), type=InferenceRequest)

    assert decoded == ingress


@pytest.mark.parametrize(
    ("fields", "seed"),
    [({}, SEED), ({"temperature": 0.5}, SEED), ({"temperature": 0}, None), ({"seed": 5}, 5)],
)
def test_random_request_without_a_seed_gets_a_seed(
    intake_rig: IntakeRig, fields: dict[str, object], seed: int | None
):
    assert intake_rig.completion(**fields).ingress.seed == seed


@pytest.mark.parametrize(
    ("headers", "body", "priority"),
    [
        ({}, None, 0),
        ({}, 3, -3),
        ({}, -3, 3),
        ({PRIORITY_LOWER_FIRST[0]: "4"}, 3, -4),
        ({PRIORITY: "4"}, 3, 4),
    ],
)
def test_lower_priority_in_the_body_is_first_and_headers_override_it(
    intake_rig: IntakeRig, headers: dict[str, str], body: int | None, priority: int
):
    assert intake_rig.completion(headers, priority=body).ingress.priority == priority


def test_session_comes_from_header_or_body(intake_rig: IntakeRig):
    named = intake_rig.completion(session_id="s1").ingress
    assert named.session == "s1"
    odd = intake_rig.completion(session_id=[1], vllm_xargs={"agentic_context": "s"}).ingress
    assert odd.session is None
    headers = {"x-session-id": "s2"}
    assert intake_rig.completion(headers, session_id="s1").ingress.session == "s2"


def test_importance_comes_from_header_body_or_service_tier(intake_rig: IntakeRig):
    given = [
        intake_rig.completion({IMPORTANCE: "low"}, importance="high"),
        intake_rig.completion(importance="low", service_tier="priority"),
        intake_rig.completion(service_tier="flex"),
        intake_rig.completion(),
    ]

    assert [accepted.ingress.importance for accepted in given] == [
        Importance.LOW,
        Importance.LOW,
        Importance.LOW,
        Importance.HIGH,
    ]


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_token_ids_are_passed_unchanged(intake_rig: IntakeRig, prompt: object):
    assert intake_rig.completion(prompt=prompt).ingress.prompt == (5, 6, 7)


def test_list_with_one_text_equals_the_text(intake_rig: IntakeRig):
    expected = intake_rig.completion().ingress

    assert intake_rig.completion(prompt=[COMPLETION["prompt"]]).ingress == expected


def test_null_fields_count_as_not_given(intake_rig: IntakeRig):
    nulls = dict.fromkeys(
        ("max_tokens", "temperature", "n", "stop", "tools", "slo", "logprobs", "seed", "stream")
    )

    assert intake_rig.completion(**nulls).ingress == intake_rig.completion().ingress


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "gpt-9"}, 404, "model_not_found", "model"),
        ({"prompt": ""}, 400, "invalid_request", "prompt"),
        ({"prompt": []}, 400, "invalid_request", "prompt"),
        ({"prompt": ["a", "b"]}, 400, "unsupported_parameter", "prompt"),
        ({"prompt": [1, "b"]}, 400, "unsupported_parameter", "prompt"),
        ({"prompt": [10**6]}, 400, "invalid_request", "prompt"),
        ({"prompt": 5}, 400, "invalid_request", "prompt"),
        ({"prompt": "word " * 20_000}, 400, "context_length_exceeded", "prompt"),
        ({"max_tokens": 10**6}, 400, "context_length_exceeded", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request", "max_tokens"),
        ({"temperature": 3}, 400, "invalid_request", "temperature"),
        ({"min_tokens": 9, "max_tokens": 3}, 400, "invalid_request", "min_tokens"),
        ({"n": 2}, 400, "unsupported_parameter", "n"),
        ({"best_of": 2}, 400, "unsupported_parameter", "best_of"),
        ({"logprobs": 5}, 400, "unsupported_parameter", "logprobs"),
        ({"echo": True}, 400, "unsupported_parameter", "echo"),
        ({"logprobs": 0}, 400, "unsupported_parameter", "logprobs"),
        ({"min_p": 0.1}, 400, "unsupported_parameter", "min_p"),
        ({"deadline": 1e308}, 400, "invalid_request", "deadline"),
        ({"deadline": 1000 * NOW}, 400, "invalid_request", "deadline"),
        ({"slo": {"deadline_at": 1e308}}, 400, "invalid_request", "deadline"),
        ({"tools": [{}]}, 400, "unsupported_parameter", "tools"),
        (
            {"response_format": {"type": "json_object"}},
            400,
            "unsupported_parameter",
            "response_format",
        ),
        ({"slo": {"ttft_s": -1}}, 400, "invalid_request", "slo.ttft_s"),
        ({"slo": {"ttft": 1}}, 400, "invalid_request", "slo"),
        ({"slo": {"ttft_s": 1e-9}}, 400, "slo_impossible", "slo.ttft_s"),
        ({"slo": {"tbt_s": 1}}, 400, "invalid_request", "slo.ttft_s"),
        ({"deadline": NOW - 1}, 400, "deadline_expired", "deadline"),
        ({"slo": {"deadline_at": NOW}}, 400, "deadline_expired", "deadline"),
        ({"service_tier": "gold"}, 400, "invalid_request", "service_tier"),
        ({"priority": 5000}, 400, "invalid_request", "priority"),
        ({"stream_options": {"include_usage": True}}, 400, "invalid_request", "stream_options"),
    ],
)
def test_refusal_names_the_problem(
    intake_rig: IntakeRig,
    fields: dict[str, object],
    status: int,
    code: str,
    param: str,
):
    with pytest.raises(ContractError) as caught:
        intake_rig.completion(**fields)

    error = caught.value
    assert (error.status, error.code, error.param) == (status, code, param)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"messages":[]}', "model"),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":[{"content":"x"}]}', "messages[0].role"),
    ],
)
def test_missing_field_is_named(intake_rig: IntakeRig, raw: bytes, param: str):
    with pytest.raises(ContractError) as caught:
        intake_rig.raw(raw, chat=True)

    assert caught.value.param == param


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[]", b"nul", b'{"model":"\\ud800"}'])
def test_undecodable_body_is_a_bad_request(intake_rig: IntakeRig, raw: bytes):
    with pytest.raises(ContractError) as caught:
        intake_rig.raw(raw)

    assert caught.value.status == 400


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = sorted(
    {*CHAT, *COMPLETION, "role", "content", "max_tokens", "slo", "stop", "seed", "priority"}
    | {"temperature", "stream", "stream_options", "n", "deadline", "response_format", "top_k"}
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6), st.booleans())
def test_any_body_is_accepted_or_refused(
    intake_rig: IntakeRig,
    fields: dict[str, object],
    chat: bool,  # noqa: FBT001  a drawn value
):
    raw = msgspec.json.encode((CHAT if chat else COMPLETION) | fields)

    assert _status(intake_rig, raw, chat=chat) in (200, 400, 404, 504)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"])},
            optional={"content": VALUES},
        ),
        max_size=3,
    )
)
def test_any_conversation_is_accepted_or_refused(intake_rig: IntakeRig, messages: list[object]):
    raw = msgspec.json.encode(CHAT | {"messages": messages})

    assert _status(intake_rig, raw, chat=True) in (200, 400)


def _status(rig: IntakeRig, raw: bytes, *, chat: bool) -> int:
    """Status of a request; an accepted request must also satisfy the grouper's schema."""
    try:
        ingress = rig.raw(raw, chat=chat).ingress
    except ContractError as error:
        return error.status
    decoded = msgspec.json.decode(msgspec.json.encode(ingress), type=InferenceRequest)
    return 200 if decoded == ingress and ingress.prompt_tokens else 500


def test_a_model_that_is_about_to_be_served_is_not_ready(intake_rig: IntakeRig) -> None:
    intake_rig.registry.expected = frozenset({"new"})
    with pytest.raises(ModelNotReadyError) as caught:
        intake_rig.completion(model="new")
    info = error_info(caught.value)

    assert (info.status, info.code, info.retry_after_s) == (503, "model_not_ready", 1.0)


def test_a_request_for_a_split_names_its_target(intake_rig: IntakeRig) -> None:
    split = TrafficSplit(name=ModelName("chat"), weights={"tiny-qwen": 1.0})
    intake_rig.registry.set_splits([split])

    assert intake_rig.completion(model="chat").ingress.model == "tiny-qwen"


def test_ends_travel_to_the_mesh(intake_rig: IntakeRig):
    ingress = intake_rig.completion(
        ttl_s=5.0, expires_at=NOW + 60.0, not_before=NOW + 10.0, on_late="drop"
    ).ingress

    assert (ingress.expires_at, ingress.ttl_s) == (NOW + 15.0, None)
    assert (ingress.not_before, ingress.on_late) == (NOW + 10.0, OnLate.DROP)


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"expires_at": NOW - 1.0}, "expires_at", 504),
        ({"expires_at": NOW + 1e9}, "expires_at", 400),
        ({"not_before": NOW + 5.0, "expires_at": NOW + 4.0}, "not_before", 400),
        ({"ttl_s": 0}, "ttl_s", 400),
        ({"on_late": "maybe"}, "on_late", 400),
    ],
)
def test_impossible_end_is_refused(
    intake_rig: IntakeRig, fields: dict[str, object], param: str, status: int
):
    with pytest.raises(ContractError) as refused:
        intake_rig.completion(**fields)

    assert (refused.value.param, refused.value.status) == (param, status)
