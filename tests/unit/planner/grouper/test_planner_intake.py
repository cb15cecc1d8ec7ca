"""Conversion of a body to a queued request, and reasons of refusals."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from services.planner.grouper.identities import request_id_of
from services.planner.grouper.intake import Intake
from services.planner.settings import GrouperSettings
from shared.contracts.base import ModelName
from shared.contracts.checks import IngressLimits
from shared.contracts.errors import ContractError
from shared.contracts.ingress import IDEMPOTENT_HEADER
from shared.contracts.qos import Importance, QosClass, Slo
from shared.contracts.requests import PromptText, QueuedRequest, ReplyMode
from shared.models.registry import ModelRegistry
from shared.tracing.context import context_of
from tests.clocks import NOW
from tests.deliveries import LooseDelivery
from tests.queued import MODEL
from tests.tracing.spans import TRACE
from tests.unit.planner.rig import BODY, LANE, OBSERVED, intake_of

SETTINGS = GrouperSettings(
    trusted_users=("gateway",), limits=IngressLimits(max_body_bytes=4000, default_max_tokens=17)
)
TEXT_BODY = {"model": MODEL, "prompt": "a" * 800, "max_tokens": 8}
CLAIMS = {"tenant": "claimed", "arrived_at": NOW - 3.0, "prompt_tokens": 2}
STORED = {IDEMPOTENT_HEADER: True}


@pytest.fixture
def intake(registry: ModelRegistry) -> Intake:
    return intake_of(registry, SETTINGS)


def delivery(body: Any, **fields: Any) -> LooseDelivery:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return LooseDelivery(body=raw, **({"message_id": "m1", "user_id": "acme"} | fields))


def accepted(intake: Intake, body: Any, **fields: Any) -> QueuedRequest:
    return intake.accept(delivery(body, **fields), NOW)


def test_fields_of_a_trusted_publisher_are_used(intake: Intake):
    request = accepted(intake, BODY | CLAIMS, user_id="gateway")
    assert (request.tenant, request.arrived_at, request.prompt_tokens) == ("claimed", NOW - 3.0, 2)


def test_fields_of_untrusted_publishers_are_ignored(intake: Intake):
    request = accepted(intake, BODY | CLAIMS, user_id="acme")
    assert (request.tenant, request.arrived_at, request.prompt_tokens) == ("acme", NOW, 3)


def test_tenant_without_an_authenticated_user_is_anonymous(intake: Intake):
    request = accepted(intake, BODY | CLAIMS, user_id=None)
    assert (request.tenant, request.arrived_at) == ("anonymous", NOW)


def test_trusted_publisher_without_a_tenant_field_is_the_tenant(intake: Intake):
    assert accepted(intake, BODY, user_id="gateway").tenant == "gateway"


def test_arrival_time_in_the_future_is_set_to_now(intake: Intake):
    body = BODY | {"arrived_at": NOW + 60}
    assert accepted(intake, body, user_id="gateway").arrived_at == NOW


def test_plain_request_is_best_effort_and_short(intake: Intake):
    request = accepted(intake, BODY, reply_to="r", headers=TRACE.headers)
    assert request.lane == LANE
    assert request.slo == Slo()
    assert (request.request_id, request.reply_to, context_of(request)) == ("m1", "r", TRACE)
    assert (request.reply_mode, request.application) == (ReplyMode.STREAM, "default")
    assert request.importance is Importance.HIGH
    assert request.grouped_at == NOW


@pytest.mark.parametrize(
    ("fields", "lane"),
    [
        ({"slo": {"ttft_s": 0.3}}, "lane.2.tiny-llama.high.0.w0"),
        ({"slo": {"ttft_s": 2.0, "ttlt_s": 900.0}}, "lane.2.tiny-llama.high.2.w0"),
        ({"slo": {"ttlt_s": 100.0}}, "lane.2.tiny-llama.high.6.w0"),
        ({"deadline": NOW + 1.0}, "lane.2.tiny-llama.high.1.w0"),
        ({"max_tokens": 3000}, "lane.2.tiny-llama.high.12.w0"),
        ({"max_tokens": 3000, "ignore_eos": True}, "lane.2.tiny-llama.high.12.w5"),
        ({"importance": "low"}, "lane.2.tiny-llama.low.12.w0"),
        ({"service_tier": "flex"}, "lane.2.tiny-llama.low.12.w0"),
        ({"model": "tiny-qwen"}, "lane.2.tiny-qwen.high.12.w0"),
    ],
)
def test_requests_are_assigned_to_lanes(intake: Intake, fields: dict[str, Any], lane: str):
    assert accepted(intake, BODY | fields).lane == lane


def test_time_before_the_queue_counts_against_the_deadline(intake: Intake):
    body = BODY | {"slo": {"ttft_s": 2.0}, "arrived_at": NOW - 1.8}
    request = accepted(intake, body, user_id="gateway")
    assert request.lane == "lane.2.tiny-llama.high.0.w0"
    assert request.deadline_at == pytest.approx(NOW + 0.2)


def test_body_id_overrides_the_message_id(intake: Intake):
    assert accepted(intake, BODY | {"id": "mine"}).request_id == "mine"
    assert accepted(intake, BODY, message_id=None, correlation_id="c").request_id == "c"


def test_random_request_gets_a_seed_and_greedy_request_gets_none(intake: Intake):
    assert accepted(intake, BODY).sampling.seed is not None
    assert accepted(intake, BODY | {"seed": 5}).sampling.seed == 5
    assert accepted(intake, BODY | {"temperature": 0}).sampling.seed is None


def test_sampling_defaults_are_the_limits(intake: Intake):
    body = {"model": BODY["model"], "prompt": "hello"}
    assert accepted(intake, body).sampling.max_tokens == 17


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": "absent"}, "model_not_found", "model"),
        ({"slo": {"ttft_s": 0.001}}, "slo_impossible", "slo.ttft_s"),
        ({"slo": {"ttft_s": 1, "tbt_s": 1e-5}}, "slo_impossible", "slo.tbt_s"),
        ({"slo": {"ttft_s": 5, "ttlt_s": 1}}, "slo_impossible", "slo.ttlt_s"),
        ({"slo": {"tbt_s": 1}}, "invalid_request", "slo.ttft_s"),
        ({"deadline": NOW - 1}, "deadline_expired", "deadline"),
        ({"max_tokens": 4094}, "context_length_exceeded", "max_tokens"),
        ({"min_tokens": 9}, "invalid_request", "min_tokens"),
        ({"stop": ["x" * 257]}, "invalid_request", "stop"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"tools": [{}]}, "unsupported_parameter", "tools"),
        ({"logprobs": True}, "unsupported_parameter", "logprobs"),
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": None}, "invalid_request", "messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, "invalid_request", "messages"),
        ({"service_tier": "gold"}, "invalid_request", "service_tier"),
        ({"prompt": "x" * 5000}, "body_too_large", None),
    ],
)
def test_refusal_names_the_field(
    intake: Intake, fields: dict[str, Any], code: str, param: str | None
):
    with pytest.raises(ContractError) as refusal:
        accepted(intake, BODY | fields)
    assert (refusal.value.code, refusal.value.param) == (code, param)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"slo": {"ttft_s": -1}}, "slo.ttft_s"),
        ({"slo": {"ttft": 1}}, "slo"),
        ({"id": "two words"}, "id"),
        ({"seed": 2**70}, "seed"),
        ({"top_k": 2**31}, "top_k"),
        ({"importance": "huge"}, "importance"),
        ({"priority": 5000}, "priority"),
    ],
)
def test_schema_violation_names_the_field(intake: Intake, fields: dict[str, Any], named: str):
    with pytest.raises(ContractError, match=rf"\$\.{named}"):
        accepted(intake, BODY | fields)


@pytest.mark.parametrize("raw", [b"", b"nonsense", b"[1]", b"\xff\xfe", b'{"model": "\xff"}'])
def test_undecodable_body_is_refused_and_has_an_id(intake: Intake, raw: bytes):
    with pytest.raises(ContractError):
        accepted(intake, raw)
    assert request_id_of(delivery(raw)) == "m1"


def test_invalid_request_is_answered_under_its_own_id(intake: Intake):
    assert request_id_of(delivery({"id": "mine", "max_tokens": 0})) == "mine"
    assert request_id_of(delivery({"id": 7})) == "m1"
    assert request_id_of(delivery(b"", message_id=None)).startswith("req-")


class TestStoredRequests:
    @pytest.fixture
    def storing(self, intake: Intake) -> Intake:
        return replace(intake, finals_kept_s=3600.0)

    @pytest.mark.parametrize("fields", [{"message_id": "m\0"}, {"reply_to": "reply.\0"}])
    def test_text_that_postgresql_refuses_is_refused(self, storing: Intake, fields: dict[str, Any]):
        """It would fail the transaction in which the store has the requests of others."""
        with pytest.raises(ContractError, match="NUL"):
            accepted(storing, BODY, headers=STORED, **fields)
        assert storing.stored_tenant(delivery(BODY, headers=STORED, **fields)) is None

    def test_refusal_of_an_id_that_postgresql_refuses_is_not_kept(self, storing: Intake):
        asked = delivery(BODY | {"id": "mine\0"}, headers=STORED)
        with pytest.raises(ContractError, match="id"):
            storing.accept(asked, NOW)
        assert storing.stored_tenant(asked) is None

    def test_other_refusals_are_kept_for_their_tenant(self, storing: Intake):
        assert storing.stored_tenant(delivery(BODY, headers=STORED)) == "acme"


def test_queue_item_is_a_request_with_a_deadline(intake: Intake):
    item = {"id": "i1", "payload": BODY, "deadline": NOW + 30, "endpoint": "/v1/completions"}
    request = accepted(intake, item)
    assert (request.request_id, request.deadline_at) == ("i1", NOW + 30)
    assert request.slo.qos_class is QosClass.NON_INTERACTIVE
    assert request.reply_mode is ReplyMode.FINAL


def test_queue_item_without_a_deadline_is_best_effort(intake: Intake):
    request = accepted(intake, {"id": "i1", "payload": BODY})
    assert request.deadline_at == math.inf


def test_queue_item_is_trusted_no_more_than_a_plain_request(intake: Intake):
    request = accepted(intake, {"id": "i1", "payload": BODY | CLAIMS})
    assert (request.tenant, request.arrived_at, request.prompt_tokens) == ("acme", NOW, 3)


def test_unknown_field_of_a_queue_items_payload_is_refused(intake: Intake):
    with pytest.raises(ContractError, match="unknown field `ttlt`") as refusal:
        accepted(intake, {"id": "i1", "payload": BODY | {"slo": {"ttlt": 60}}})
    assert refusal.value.param == "payload"


def test_invalid_payload_of_a_queue_item_is_named(intake: Intake):
    with pytest.raises(ContractError, match=r"\$\.max_tokens") as refusal:
        accepted(intake, {"id": "i1", "payload": BODY | {"max_tokens": 0}})
    assert refusal.value.param == "payload"


class TestLengthOfText:
    def test_length_is_learnt_from_the_engines_counts(self, intake: Intake):
        assert accepted(intake, TEXT_BODY).prompt_tokens == 200
        text = PromptText(num_bytes=400)
        for _ in range(300):
            intake.learn(msgspec.structs.replace(OBSERVED, prompt_text=text, prompt_tokens=200))

        assert accepted(intake, TEXT_BODY).prompt_tokens == pytest.approx(400, rel=0.02)

    def test_token_ids_and_unknown_models_are_not_learnt(self, intake: Intake):
        text = PromptText(num_bytes=400)
        for _ in range(300):
            intake.learn(msgspec.structs.replace(OBSERVED, prompt_tokens=200))
            unknown = msgspec.structs.replace(OBSERVED, model=ModelName("gone"))
            intake.learn(msgspec.structs.replace(unknown, prompt_text=text, prompt_tokens=200))

        assert accepted(intake, TEXT_BODY).prompt_tokens == 200
