"""Rules that look at the tokens of an answer count those of earlier runs."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from shared.contracts.base import ModelName
from shared.contracts.requests import FinishReason, Tokens
from shared.models.tiny_tokenizer import train_tokenizer
from tests.contract.engine.engines import prompt_of
from tests.contract.structured.structured_engines import (
    BEGIN_THINKING,
    END_THINKING,
    OTHER,
    PLAIN,
    THINKING,
    StructuredRig,
    structured_rig,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = prompt_of(30)
LENGTH = 24
END = 77
"""A token that ends answers of some rules."""
RULES: dict[str, dict[str, Any]] = {
    "max_tokens": {},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [END], "logit_bias": {END: 100.0}},
    "presence_penalty": {"presence_penalty": 1.9},
    "frequency_penalty": {"frequency_penalty": 1.9},
    "repetition_penalty": {"repetition_penalty": 1.7},
    # The second token of a bad word is likely, and its first token may be in the progress.
    "bad_words": {"_bad_words_token_ids": [[40, 41]], "logit_bias": {40: 50.0, 41: 51.0}},
    "repetition_detection": {
        "repetition_detection": {"max_pattern_size": 2, "min_count": 5},
        "logit_bias": {40: 100.0},
    },
    "penalties together": {"presence_penalty": 1.0, "repetition_penalty": 1.2, "min_tokens": 5},
}
ENDS = {
    "min_tokens": FinishReason.STOP,
    "repetition_detection": FinishReason.REPETITION,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StructuredRig]:
    async with structured_rig(tmp_path_factory.mktemp("models")) as rig:
        yield rig


async def continued(
    rig: StructuredRig, model: ModelName, prompt: Tokens, whole: Tokens, **sampling: Any
) -> dict[int, Tokens]:
    """Place of a cut -> the answer that *model*, which is active, continues there."""
    places = range(1, len(whole))
    rests = await asyncio.gather(
        *(rig.constrained(model, prompt, whole[:place], **sampling) for place in places)
    )
    return {
        place: whole[:place] + rest.token_ids for place, rest in zip(places, rests, strict=True)
    }


@pytest.mark.parametrize("rule", RULES)
async def test_rules_count_the_tokens_of_earlier_runs(rig: StructuredRig, rule: str) -> None:
    sampling = {"max_tokens": LENGTH} | RULES[rule]
    await rig.engine.activate(PLAIN)
    whole = await rig.constrained(PLAIN, PROMPT, **sampling)
    await rig.engine.activate(OTHER)
    answers = await continued(rig, OTHER, PROMPT, whole.token_ids, **sampling)

    assert whole.finish_reason is ENDS.get(rule, whole.finish_reason)
    assert len(whole.token_ids) > 4
    assert answers == dict.fromkeys(answers, whole.token_ids)


async def test_stop_strings_may_begin_in_earlier_runs(rig: StructuredRig) -> None:
    await rig.engine.activate(PLAIN)
    plain = await rig.constrained(PLAIN, PROMPT, max_tokens=LENGTH)
    text = train_tokenizer().decode(list(plain.token_ids))
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    sampling = {"max_tokens": LENGTH, "stop": [stop]}
    whole = await rig.constrained(PLAIN, PROMPT, **sampling)
    await rig.engine.activate(OTHER)
    answers = await continued(rig, OTHER, PROMPT, whole.token_ids, **sampling)

    assert whole.finish_reason is FinishReason.STOP
    assert plain.token_ids[: len(whole.token_ids)] == whole.token_ids
    assert len(whole.token_ids) < LENGTH
    assert answers == dict.fromkeys(answers, whole.token_ids)


@pytest.mark.parametrize(
    ("sampling", "progress"),
    [({"stop_token_ids": [END]}, (40, END)), ({"stop": ["q"]}, None)],
    ids=["stop token", "stop string"],
)
async def test_progress_that_is_the_whole_answer_needs_no_run(
    rig: StructuredRig, sampling: dict[str, Any], progress: Tokens | None
) -> None:
    """An agent may die between the last token and the final."""
    await rig.engine.activate(PLAIN)
    whole = progress or tuple(train_tokenizer().encode("queue").ids)
    answer = await rig.constrained(PLAIN, PROMPT, whole, **sampling)

    assert (answer.token_ids, answer.finish_reason) == ((), FinishReason.STOP)


@pytest.mark.parametrize("penalty", [0.0, 0.4])
async def test_thinking_budget_counts_the_reasoning_of_earlier_runs(
    rig: StructuredRig, penalty: float
) -> None:
    await rig.engine.activate(THINKING)
    sampling = {
        "max_tokens": LENGTH,
        "thinking_token_budget": 8,
        "presence_penalty": penalty,
        "logit_bias": {END_THINKING: -100.0},
    }
    prompt = (*PROMPT, BEGIN_THINKING)
    whole = await rig.constrained(THINKING, prompt, **sampling)
    answers = await continued(rig, THINKING, prompt, whole.token_ids, **sampling)

    assert whole.token_ids.index(END_THINKING) == 8
    assert answers == dict.fromkeys(answers, whole.token_ids)
