"""Counted prompt lengths refuse or limit requests; lengths predicted from bytes do not."""

from typing import Any

import msgspec
import pytest

from services.planner.grouper.intake import Intake
from services.planner.settings import GrouperSettings
from shared.contracts.checks import IngressLimits
from shared.contracts.errors import ContractError
from shared.contracts.requests import QueuedRequest
from shared.models.registry import ModelRegistry
from shared.models.tiny import MAX_MODEL_LEN
from solver.scheduling.window import tokens_needed
from tests.clocks import NOW
from tests.deliveries import LooseDelivery
from tests.queued import MODEL
from tests.unit.planner.rig import intake_of

LONG = "a" * 4 * (MAX_MODEL_LEN + 1000)
"""Text whose predicted length exceeds the model's limit; a tokenizer may find fewer tokens."""
DEFAULT = 17
SETTINGS = GrouperSettings(
    trusted_users=("gateway",), limits=IngressLimits(default_max_tokens=DEFAULT)
)


@pytest.fixture
def intake(registry: ModelRegistry) -> Intake:
    return intake_of(registry, SETTINGS)


def accepted(intake: Intake, *, user_id: str = "acme", **fields: Any) -> QueuedRequest:
    body = {"model": MODEL, **fields}
    raw = msgspec.json.encode(body)
    return intake.accept(LooseDelivery(body=raw, message_id="m1", user_id=user_id), NOW)


def refusal(intake: Intake, **fields: Any) -> tuple[str | None, str | None]:
    with pytest.raises(ContractError) as refused:
        accepted(intake, **fields)
    return refused.value.code, refused.value.param


@pytest.mark.parametrize(
    "text",
    [{"prompt": LONG}, {"messages": [{"role": "user", "content": LONG}]}],
    ids=["prompt", "messages"],
)
@pytest.mark.parametrize(
    ("asked", "max_tokens"),
    [
        ({}, DEFAULT),
        ({"max_tokens": 500}, 500),
        ({"max_completion_tokens": 600, "max_tokens": 5}, 600),
        ({"max_tokens": MAX_MODEL_LEN - 1}, MAX_MODEL_LEN - 1),
        ({"min_tokens": DEFAULT}, DEFAULT),
    ],
)
def test_text_predicted_too_long_keeps_its_requested_answer(
    intake: Intake, text: dict[str, Any], asked: dict[str, Any], max_tokens: int
):
    request = accepted(intake, **text, **asked, ignore_eos=True)

    assert request.sampling.max_tokens == max_tokens
    assert tokens_needed(request) == MAX_MODEL_LEN


def test_trusted_publisher_without_a_count_is_predicted(intake: Intake):
    assert accepted(intake, user_id="gateway", prompt=LONG).sampling.max_tokens == DEFAULT


def test_text_that_fits_keeps_its_predicted_length(intake: Intake):
    assert accepted(intake, prompt="a" * 800, max_tokens=8).prompt_tokens == 200


def test_default_answer_beyond_the_model_leaves_one_prompt_token(registry: ModelRegistry):
    limits = IngressLimits(default_max_tokens=2 * MAX_MODEL_LEN)
    request = accepted(intake_of(registry, GrouperSettings(limits=limits)), prompt=LONG)

    assert (request.prompt_tokens, request.sampling.max_tokens) == (1, MAX_MODEL_LEN - 1)


def test_answer_that_leaves_no_room_for_a_prompt_is_refused(intake: Intake):
    for prompt in ("a", LONG):
        code = refusal(intake, prompt=prompt, max_tokens=MAX_MODEL_LEN)
        assert code == ("context_length_exceeded", "max_tokens")


@pytest.mark.parametrize(
    "counted",
    [
        {"prompt": [10] * MAX_MODEL_LEN},
        {"prompt": "a", "prompt_tokens": MAX_MODEL_LEN, "user_id": "gateway"},
    ],
    ids=["token ids", "counted by the gateway"],
)
def test_counted_prompts_beyond_the_limit_are_refused(intake: Intake, counted: dict[str, Any]):
    assert refusal(intake, **counted) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    "counted",
    [
        {"prompt": [10] * (MAX_MODEL_LEN - 8)},
        {"prompt": "a", "prompt_tokens": MAX_MODEL_LEN - 8, "user_id": "gateway"},
    ],
    ids=["token ids", "counted by the gateway"],
)
def test_answers_beyond_the_limit_are_refused_for_counted_prompts(
    intake: Intake, counted: dict[str, Any]
):
    fields = counted | {"max_tokens": 9}
    assert refusal(intake, **fields) == ("context_length_exceeded", "max_tokens")
