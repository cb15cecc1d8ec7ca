"""An answer that is evicted and resumed elsewhere stays the same, with any parameters."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ops.engine_runs import generate
from shared.contracts.requests import (
    FinishReason,
    Progress,
    RequestCompleted,
    Sampling,
    Tokens,
)
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.models.tokenizer import Tokenizer
from tests.agents.rig import REPLY, open_agent
from tests.contract.engine.engines import LLAMA, EngineRig, greedy, prompt_of, vllm_rig
from tests.queued import a_request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]

NUM_TOKENS = 60
CUTS = (7, 33)
"""
Answer tokens after which the run is aborted on the first and on the second engine, approximately.
"""
PROMPT_TOKENS = 150
SMALL_BUDGET = 64
"""Token budget of the second engine, with which a prompt takes several iterations."""


def random(seed: int, **fields: Any) -> Sampling:
    return Sampling(max_tokens=NUM_TOKENS, **({"seed": seed, "ignore_eos": True} | fields))


def penalised(**fields: Any) -> Sampling:
    return greedy(NUM_TOKENS, **fields)


CASES: dict[str, Sampling] = {
    "greedy": greedy(NUM_TOKENS),
    "end token": greedy(NUM_TOKENS, ignore_eos=False),
    "presence": penalised(presence_penalty=1.5),
    "presence, encouraged": penalised(presence_penalty=-1.5),
    "frequency": penalised(frequency_penalty=0.7),
    "frequency, encouraged": penalised(frequency_penalty=-0.7),
    "repetition": penalised(repetition_penalty=1.3),
    "repetition, encouraged": penalised(repetition_penalty=0.8),
    "all penalties": penalised(presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.1),
    "seed": random(7),
    "seed that vLLM takes for none": random(-1),
    "largest seed": random(2**63 - 1),
    "hot": random(8, temperature=2.0),
    "cool": random(8, temperature=0.3),
    "top_p": random(9, top_p=0.7),
    "top_k": random(10, top_k=20),
    "everything": random(
        11,
        temperature=0.8,
        top_p=0.9,
        top_k=50,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        min_tokens=40,
        ignore_eos=False,
    ),
}


@dataclass(frozen=True)
class Engines:
    """Two engines that differ in all settings that must not affect answers."""

    one: EngineRig
    other: EngineRig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    one = vllm_rig(tmp_path_factory.mktemp("one"), policy="qoserve")
    other = vllm_rig(
        tmp_path_factory.mktemp("other"),
        token_budget=SMALL_BUDGET,
        max_running=len(CASES),
        prefix_caching=False,
        host_kv_bytes=0,
    )
    try:
        await one.bring_up()
        await other.bring_up()
        yield Engines(one, other)
    finally:
        await one.engine.close()
        await other.engine.close()


def prompt(name: str) -> Tokens:
    return prompt_of(PROMPT_TOKENS, first=list(CASES).index(name))


async def evicted(
    rig: EngineRig, asked: Tokens, sampling: Sampling, progress: Tokens, tokens: int
) -> Tokens:
    """Resume from *progress*, abort at about *tokens* tokens, and return the new progress."""
    async for output in generate(rig.engine, rig.request(asked, sampling, progress=progress)):
        progress += output.token_ids
        if len(progress) >= tokens:
            break
    return progress


async def wandering(engines: Engines, name: str) -> tuple[Tokens, FinishReason | None]:
    """The answer of a request that runs on the first engine, the second, and again the first."""
    asked, sampling = prompt(name), CASES[name]
    progress = await evicted(engines.one, asked, sampling, (), CUTS[0])
    progress = await evicted(engines.other, asked, sampling, progress, CUTS[1])
    rest = await engines.one.ask(asked, sampling, progress=progress)
    return progress + rest.token_ids, rest.finish_reason


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(engines: Engines) -> dict[str, tuple[Tokens, FinishReason | None]]:
    """Answers of single requests on one engine."""
    answers = {}
    for name, sampling in CASES.items():
        answer = await engines.one.ask(prompt(name), sampling)
        answers[name] = answer.token_ids, answer.finish_reason
    return answers


@pytest.mark.parametrize("name", CASES)
async def test_an_evicted_answer_continues_unchanged(
    engines: Engines, undisturbed: dict[str, tuple[Tokens, FinishReason | None]], name: str
) -> None:
    assert await wandering(engines, name) == undisturbed[name]


async def test_an_evicted_answer_continues_unchanged_beside_other_requests(
    engines: Engines, undisturbed: dict[str, tuple[Tokens, FinishReason | None]]
) -> None:
    """All cases run concurrently, so that rows of one iteration have different parameters."""
    async with asyncio.timeout(120):
        answers = await asyncio.gather(*(wandering(engines, name) for name in CASES))

    assert dict(zip(CASES, answers, strict=True)) == undisturbed


async def test_each_case_affects_the_answer(
    undisturbed: dict[str, tuple[Tokens, FinishReason | None]], engines: Engines
) -> None:
    """If a case did not affect the answer, other tests could not detect an ignored field."""
    for name in CASES:
        plain = await engines.one.ask(prompt(name), greedy(NUM_TOKENS))
        differs = plain.token_ids != undisturbed[name][0]
        assert differs == (name not in ("greedy", "end token")), name


@pytest.mark.parametrize("cut", [0, 5, 11, 12, 20])
async def test_min_tokens_are_counted_over_all_runs(engines: Engines, cut: int) -> None:
    asked = prompt_of(PROMPT_TOKENS, first=90)
    whole = (await engines.one.ask(asked, greedy(40))).token_ids
    stops = tuple(set(whole))
    sampling = greedy(40, min_tokens=12)
    expected = await engines.one.ask(asked, sampling, stop_token_ids=stops)
    progress = expected.token_ids[:cut]
    rest = await engines.other.ask(asked, sampling, stop_token_ids=stops, progress=progress)

    assert progress + rest.token_ids == expected.token_ids
    assert expected.finish_reason is rest.finish_reason


async def test_a_random_prompt_of_several_iterations_kills_no_engine(
    engines: Engines,
) -> None:
    """vLLM's model runner V1 rewinds random generators, which fails for CPU generators."""
    asked = prompt_of(20 * SMALL_BUDGET, first=91)
    answers = await asyncio.gather(
        *(engines.other.ask(asked, random(seed), model=LLAMA) for seed in (1, 1, 2))
    )
    tokens = [answer.token_ids for answer in answers]

    assert tokens[0] == tokens[1] != tokens[2]
    assert engines.other.engine.alive


async def test_a_stop_string_may_begin_before_the_eviction(
    engines: Engines, tmp_path: Path
) -> None:
    """Text that an agent held back for a stop string is not lost on another engine."""
    path = make_tiny_models(tmp_path, weights=False)
    registry = ModelRegistry.load(path)
    tokenizer = Tokenizer.load(Path(registry.entry(LLAMA).path))
    asked = prompt_of(PROMPT_TOKENS, first=92)

    async def final_of(rig: EngineRig, stop: tuple[str, ...], progress: Tokens) -> RequestCompleted:
        async with open_agent(registry, path, engine=rig.engine) as agent:
            request = a_request(
                prompt=asked,
                reply_to=REPLY,
                sampling=greedy(NUM_TOKENS, stop=stop),
                progress=Progress(token_ids=progress),
            )
            await agent.put(request)
            return await agent.completed()

    whole = await final_of(engines.one, (), ())
    cut, stop = stop_across(tokenizer, whole.token_ids)
    stopped = await final_of(engines.one, (stop,), ())
    resumed = await final_of(engines.other, (stop,), whole.token_ids[:cut])

    assert stopped.finish_reason is FinishReason.STOP
    assert whole.text.startswith(stopped.text + stop)
    assert cut < len(stopped.token_ids) < NUM_TOKENS
    assert (resumed.text, resumed.token_ids) == (stopped.text, stopped.token_ids)
    assert resumed.finish_reason is stopped.finish_reason


def stop_across(tokenizer: Tokenizer, token_ids: Tokens) -> tuple[int, str]:
    """Return a position in the answer, and a unique string that spans this position."""
    decoder = tokenizer.decoder()
    text, ends = "", []
    for token in token_ids:
        text += decoder.push((token,))
        ends.append(len(text))
    for cut in range(8, len(ends) - 1):
        stop = text[ends[cut - 2] : ends[cut]]
        if len(stop) > 1 and ends[cut - 2] < ends[cut - 1] < ends[cut] and text.count(stop) == 1:
            return cut, stop
    pytest.fail(f"no suitable string in {text!r}")
