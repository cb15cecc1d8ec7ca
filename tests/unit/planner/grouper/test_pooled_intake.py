"""Requests to pooling models in groupers."""

from typing import Any

import msgspec
import pytest

from services.planner.grouper.intake import Intake
from services.planner.settings import GrouperSettings
from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import QueuedRequest
from shared.models.registry import ModelRegistry
from solver.scheduling.window import tokens_needed
from tests.clocks import NOW
from tests.deliveries import LooseDelivery
from tests.unit.planner.rig import intake_of

BODY: dict[str, Any] = {"model": "e", "prompt": [10] * 40, "input_lengths": [16, 16, 8]}


@pytest.fixture
def intake() -> Intake:
    """The longest input has as many tokens as the model allows."""
    entries = (
        ModelEntry(name=ModelName("e"), path="", architecture="", max_model_len=16, task="embed"),
        ModelEntry(name=ModelName("g"), path="", architecture="", max_model_len=16),
    )
    return intake_of(ModelRegistry(entries), GrouperSettings(trusted_users=("gateway",)))


def accepted(intake: Intake, user_id: str = "gateway", **fields: Any) -> QueuedRequest:
    body = msgspec.json.encode(BODY | fields)
    return intake.accept(LooseDelivery(body=body, message_id="m1", user_id=user_id), NOW)


def test_room_counts_the_tokens_of_all_inputs(intake: Intake):
    request = accepted(intake)

    assert request.input_lengths == (16, 16, 8)
    assert (request.prompt_tokens, request.answer_tokens, tokens_needed(request)) == (40, 0, 40)
    assert request.lane.endswith(".w0")


def test_target_is_the_time_to_the_whole_answer(intake: Intake):
    request = accepted(intake, slo={"ttft_s": 1.5, "tbt_s": 0.1})

    assert request.slo == Slo(ttlt_s=1.5)
    assert request.deadline_at == NOW + 1.5


@pytest.mark.parametrize(
    ("user_id", "fields", "code"),
    [
        ("acme", {}, "unsupported_task"),
        ("gateway", {"input_lengths": []}, "unsupported_task"),
        ("gateway", {"model": "g"}, "unsupported_task"),
        ("gateway", {"input_lengths": [20, 20]}, "context_length_exceeded"),
        ("gateway", {"input_lengths": [20]}, "invalid_request"),
    ],
    ids=["untrusted", "no inputs", "other model", "too long", "other prompt"],
)
def test_refusals(intake: Intake, user_id: str, fields: dict[str, Any], code: str):
    with pytest.raises(ContractError) as refused:
        accepted(intake, user_id, **fields)
    assert refused.value.code == code
