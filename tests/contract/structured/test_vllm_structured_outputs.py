"""Structured answers are valid, and equal when they are evicted and resumed on another engine."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from shared.contracts.base import RequestId
from shared.contracts.errors import EngineError
from shared.contracts.requests import FinishReason, Tokens
from shared.models.tiny_tokenizer import train_tokenizer
from tests.contract.engine.engines import greedy, prompt_of
from tests.contract.structured.structured_engines import (
    BEGIN_THINKING,
    END_THINKING,
    OTHER,
    PLAIN,
    SPOILED,
    THINKING,
    StructuredRig,
    structured_rig,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = prompt_of(40)
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["kind", "count", "note"],
    "properties": {
        "kind": {"enum": ["queue", "engine"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 999},
        "note": {"type": "string", "pattern": "^[A-Za-z ,.]{1,12}$"},
    },
}
WORDS = ["left", "leftmost", "the right"]
CODE = "[a-f]{3,9}-[0-9]{2}"
NUM_CUTS = 6
TOKENIZER = train_tokenizer()


def is_object(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["kind", "count", "note"]
        and value["kind"] in ("queue", "engine")
        and 1 <= value["count"] <= 999
        and re.fullmatch("[A-Za-z ,.]{1,12}", value["note"]) is not None
    )


class Case(NamedTuple):
    constraint: dict[str, Any]
    is_valid: Callable[[str], bool]


CASES = {
    "json_schema": Case({"json": SCHEMA}, is_object),
    "choice": Case({"choice": WORDS}, WORDS.__contains__),
    "regex": Case({"regex": CODE}, lambda text: re.fullmatch(CODE, text) is not None),
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StructuredRig]:
    async with structured_rig(tmp_path_factory.mktemp("models")) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(rig: StructuredRig) -> dict[tuple[str, str], Tokens]:
    """Undisturbed answers of one engine, by case and sampling."""
    await rig.engine.activate(PLAIN)
    answers = {}
    for case, (constraint, _) in CASES.items():
        for name, sampling in SAMPLINGS.items():
            answer = await rig.constrained(PLAIN, PROMPT, structured_outputs=constraint, **sampling)
            assert answer.finish_reason is FinishReason.STOP
            answers[case, name] = answer.token_ids
    return answers


def cuts(num_tokens: int) -> list[int]:
    """Different places in an answer, with the first and the last."""
    return sorted({1 + place * (num_tokens - 2) // (NUM_CUTS - 1) for place in range(NUM_CUTS)})


def text_of(token_ids: Tokens) -> str:
    return TOKENIZER.decode(list(token_ids), skip_special_tokens=True)


@pytest.mark.parametrize("case", CASES)
async def test_answers_are_valid(whole: dict[tuple[str, str], Tokens], case: str) -> None:
    for name in SAMPLINGS:
        assert CASES[case].is_valid(text_of(whole[case, name]))


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("case", CASES)
async def test_a_cut_answer_continues_unchanged_on_another_engine(
    rig: StructuredRig, whole: dict[tuple[str, str], Tokens], case: str, name: str
) -> None:
    await rig.engine.activate(OTHER)
    expected = whole[case, name]
    places = cuts(len(expected))
    rests = await asyncio.gather(
        *(
            rig.constrained(
                OTHER,
                PROMPT,
                expected[:place],
                structured_outputs=CASES[case].constraint,
                **SAMPLINGS[name],
            )
            for place in places
        )
    )

    assert {
        place: expected[:place] + rest.token_ids for place, rest in zip(places, rests, strict=True)
    } == dict.fromkeys(places, expected)


async def test_grammars_begin_after_the_reasoning_of_earlier_runs(rig: StructuredRig) -> None:
    """The prompt ends an earlier turn's reasoning and begins that of the answer."""
    await rig.engine.activate(THINKING)
    prompt = (BEGIN_THINKING, 20, END_THINKING, *PROMPT, BEGIN_THINKING)
    thoughts = prompt_of(7)
    ending: dict[str, Any] = {
        "structured_outputs": CASES["json_schema"].constraint,
        # The bias ends the reasoning as soon as it may end.
        "logit_bias": {END_THINKING: 100.0},
    }
    rest = await rig.constrained(THINKING, prompt, thoughts, **ending)
    expected = thoughts + rest.token_ids
    assert rest.token_ids[0] == END_THINKING
    assert is_object(text_of(rest.token_ids[1:]))

    places = [len(thoughts) + place for place in (0, 1, 2, 8, len(rest.token_ids) - 1)]
    rests = await asyncio.gather(
        *(rig.constrained(THINKING, prompt, expected[:place], **ending) for place in places)
    )
    answers = [expected[:place] + rest.token_ids for place, rest in zip(places, rests, strict=True)]
    assert answers == [expected] * len(places)


@pytest.mark.parametrize(
    ("constraint", "progress", "reason"),
    [
        ({"regex": "[a-"}, (), "regex|grammar"),
        ({"choice": []}, (), "cannot be an empty list"),
        ({"json": SCHEMA, "regex": CODE}, (), "only use one kind"),
        ({"regex": CODE}, (90, 91), "tokens of earlier runs do not follow the grammar"),
    ],
    ids=["no regex", "empty choice", "two constraints", "wrong progress"],
)
async def test_a_bad_grammar_ends_its_own_request(
    rig: StructuredRig,
    whole: dict[tuple[str, str], Tokens],
    constraint: dict[str, Any],
    progress: Tokens,
    reason: str,
) -> None:
    await rig.engine.activate(OTHER)
    beside = asyncio.create_task(
        rig.constrained(OTHER, PROMPT, structured_outputs=CASES["json_schema"].constraint)
    )
    with pytest.raises(EngineError, match=reason) as refused:
        await rig.constrained(OTHER, PROMPT, progress, structured_outputs=constraint)

    assert not refused.value.engine_dead
    assert (await beside).token_ids == whole["json_schema", "greedy"]


async def test_a_bad_output_ends_its_own_request(rig: StructuredRig) -> None:
    await rig.engine.activate(OTHER)
    beside = asyncio.create_task(rig.ask(PROMPT, greedy(24), model=OTHER))
    spoiled = RequestId(f"{SPOILED}-1")
    with pytest.raises(EngineError, match="soon") as refused:
        await rig.ask(PROMPT, greedy(1000), model=OTHER, request_id=spoiled)

    assert not refused.value.engine_dead
    assert len((await beside).token_ids) == 24
    await rig.settled()
