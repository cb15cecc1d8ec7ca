"""What a gateway publishes of HTTP requests, and what it refuses."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.headers import IMPORTANCE, PRIORITY, PRIORITY_LOWER_FIRST
from shared.contracts.base import ModelName
from shared.contracts.ingress import CallRequest
from shared.contracts.models import TrafficSplit
from shared.contracts.qos import Importance, OnLate, Slo
from tests.unit.gateway.rig import CHAT, COMPLETION, MODEL, NOW, DoorRig, Refused


def test_accepted_request_is_stamped_and_published_as_it_came(door_rig: DoorRig):
    raw = msgspec.json.encode(CHAT | {"max_tokens": 7, "logit_bias": {"5": 1}, "n": 2})
    published = door_rig.send(raw, path="/v1/chat/completions")
    assert isinstance(published, CallRequest)

    assert published.id is not None
    assert published == CallRequest(
        endpoint="/v1/chat/completions",
        body=msgspec.Raw(raw),
        model=MODEL,
        id=published.id,
        tenant="default",
        arrived_at=NOW,
        slo=Slo(ttlt_s=60.0),
        importance=Importance.HIGH,
        priority=0,
    )


def test_fields_of_the_mesh_stay_out_of_the_body(door_rig: DoorRig):
    published = door_rig.completion(slo={"ttft_s": 1.5}, importance="low", priority=3, ttl_s=9)

    assert msgspec.json.decode(published.body) == COMPLETION
    assert (published.slo, published.priority) == (Slo(ttft_s=1.5), -3)


def test_published_form_satisfies_its_own_schema(door_rig: DoorRig):
    published = door_rig.completion(stop=["x"], seed=3, service_tier="flex", stream=True)

    decoded = msgspec.json.decode(msgspec.json.encode(published), type=CallRequest)

    assert decoded == published


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
    door_rig: DoorRig, headers: dict[str, str], body: int | None, priority: int
):
    assert door_rig.completion(headers, priority=body).priority == priority


def test_session_comes_from_header_or_body(door_rig: DoorRig):
    named = door_rig.completion(session_id="s1")
    assert named.session == "s1"
    odd = door_rig.completion(session_id=[1], vllm_xargs={"agentic_context": "s"})
    assert odd.session is None
    headers = {"x-session-id": "s2"}
    assert door_rig.completion(headers, session_id="s1").session == "s2"


def test_importance_comes_from_header_body_or_service_tier(door_rig: DoorRig):
    given = [
        door_rig.completion({IMPORTANCE: "low"}, importance="high"),
        door_rig.completion(importance="low", service_tier="priority"),
        door_rig.completion(service_tier="flex"),
        door_rig.completion(),
    ]

    assert [each.importance for each in given] == [
        Importance.LOW,
        Importance.LOW,
        Importance.LOW,
        Importance.HIGH,
    ]


def test_null_fields_count_as_not_given(door_rig: DoorRig):
    nulls = dict.fromkeys(("slo", "importance", "deadline", "service_tier", "stream", "priority"))
    published, plain = door_rig.completion(**nulls), door_rig.completion()

    assert msgspec.structs.replace(published, id=None, body=plain.body) == (
        msgspec.structs.replace(plain, id=None)
    )


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "gpt-9"}, 404, "model_not_found", "model"),
        ({"max_tokens": 0}, 400, "invalid_request", "max_tokens"),
        ({"top_p": 7}, 400, "invalid_request", "top_p"),
        ({"prompt": "a" * 1_100_000}, 400, "context_length_exceeded", "prompt"),
        ({"deadline": 1e308}, 400, "invalid_request", "deadline"),
        ({"deadline": 1000 * NOW}, 400, "invalid_request", "deadline"),
        ({"slo": {"deadline_at": 1e308}}, 400, "invalid_request", "deadline"),
        ({"slo": {"ttft_s": -1}}, 400, "invalid_request", "slo.ttft_s"),
        ({"slo": {"ttft": 1}}, 400, "invalid_request", "slo"),
        ({"slo": {"ttft_s": 1e-9}}, 400, "slo_impossible", "slo.ttft_s"),
        ({"slo": {"tbt_s": 1}}, 400, "invalid_request", "slo.ttft_s"),
        ({"deadline": NOW - 1}, 400, "deadline_expired", "deadline"),
        ({"slo": {"deadline_at": NOW}}, 400, "deadline_expired", "deadline"),
        ({"service_tier": "gold"}, 400, "invalid_request", "service_tier"),
        ({"priority": 5000}, 400, "invalid_request", "priority"),
        ({"stream": "maybe"}, 400, "invalid_request", "stream"),
    ],
)
def test_refusal_names_the_problem(
    door_rig: DoorRig,
    fields: dict[str, object],
    status: int,
    code: str,
    param: str,
):
    refused = door_rig.refusal(**fields)

    assert (refused.status, refused.code, refused.param) == (status, code, param)


def test_a_text_that_is_cut_may_be_longer_than_the_context(door_rig: DoorRig):
    published = door_rig.completion(prompt="a" * 1_100_000, truncate_prompt_tokens=64)

    assert len(bytes(published.body)) > 1_100_000


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[]", b"nul", b'{"model":"\\ud800"}', b"{}"])
def test_undecodable_body_is_a_bad_request(door_rig: DoorRig, raw: bytes):
    refused = door_rig.send(raw)

    assert isinstance(refused, Refused)
    assert refused.status == 400


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
    door_rig: DoorRig,
    fields: dict[str, object],
    chat: bool,  # noqa: FBT001  a drawn value
):
    raw = msgspec.json.encode((CHAT if chat else COMPLETION) | fields)

    assert _status(door_rig, raw, chat=chat) in (200, 400, 404, 504)


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
def test_any_conversation_is_accepted_or_refused(door_rig: DoorRig, messages: list[object]):
    raw = msgspec.json.encode(CHAT | {"messages": messages})

    assert _status(door_rig, raw, chat=True) in (200, 400)


def _status(rig: DoorRig, raw: bytes, *, chat: bool) -> int:
    """Status of a request; what is published must also satisfy the grouper's schema."""
    answer = rig.send(raw, path="/v1/chat/completions" if chat else "/v1/completions")
    if isinstance(answer, Refused):
        return answer.status
    decoded = msgspec.json.decode(msgspec.json.encode(answer), type=CallRequest)
    return 200 if decoded == answer else 500


def test_a_model_that_is_about_to_be_served_is_not_ready(models: Path) -> None:
    rig = DoorRig(models)
    rig.registry.expected = frozenset({"new"})
    refused = rig.refusal(model="new")

    assert (refused.status, refused.code) == (503, "model_not_ready")


def test_a_request_for_a_split_names_its_target(models: Path) -> None:
    rig = DoorRig(models)
    split = TrafficSplit(name=ModelName("chat"), weights={"tiny-qwen": 1.0})
    rig.registry.set_splits([split])
    published = rig.completion(model="chat")

    assert published.model == msgspec.json.decode(published.body)["model"] == "tiny-qwen"


def test_ends_travel_to_the_mesh(door_rig: DoorRig):
    published = door_rig.completion(
        ttl_s=5.0, expires_at=NOW + 60.0, not_before=NOW + 10.0, on_late="drop"
    )

    assert published.expires_at == NOW + 15.0
    assert (published.not_before, published.on_late) == (NOW + 10.0, OnLate.DROP)


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
    door_rig: DoorRig, fields: dict[str, object], param: str, status: int
):
    refused = door_rig.refusal(**fields)

    assert (refused.param, refused.status) == (param, status)
