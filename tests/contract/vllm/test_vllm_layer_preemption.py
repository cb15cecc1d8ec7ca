"""Preemption inside vLLM's forward pass recomputes only dropped work."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from services.agent.backends.base import SchedulingParameters
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
from services.agent.backends.vllm.shared.safepoints import Wish
from shared.contracts.base import ModelName
from shared.contracts.errors import EngineError
from shared.contracts.qos import Slo
from shared.contracts.requests import Tokens
from tests.contract.engine.engines import (
    LLAMA,
    Answer,
    EngineRig,
    greedy,
    prompt_of,
    tiny_entries,
    vllm_rig,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]

CACHING, NOT_CACHING, COMPILED = (
    ModelName(name) for name in ("caching", "not-caching", "compiled")
)
CHUNK_TOKENS = 1024
LONG = prompt_of(3600, first=1)
SHARING = LONG[:2000]
CHAT = prompt_of(50, first=200)
PATIENT = Slo(ttft_s=20, tbt_s=1)
NUM_CUTS = 20
ROUNDS = 5
"""Maximum number of attempts until one answer has enough cuts."""
HASTY_ROUNDS = 20
"""Maximum number of attempts until a request arrives early enough to cut an iteration."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineRig]:
    directory = tmp_path_factory.mktemp("models")
    kill = vllm_rig(directory).kill  # without vLLM, the test is skipped or fails
    base = next(each for each in tiny_entries(directory, weights=True) if each.name == LLAMA)
    variants = {
        CACHING: {},
        NOT_CACHING: {"enable_prefix_caching": False},
        COMPILED: {"enforce_eager": False},
    }
    entries = tuple(
        msgspec.structs.replace(base, name=name, engine_args=base.engine_args | engine_args)
        for name, engine_args in variants.items()
    )
    settings = VllmSettings(
        log_path=str(directory / "vllm.log"),
        warm_bytes=3 << 30,
        token_budget=CHUNK_TOKENS,
        safepoint_layers=4,
    )
    engine = VllmEngine(entries, settings)
    await engine.start()
    yield EngineRig(engine, kill)
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(rig: EngineRig) -> dict[Tokens, Tokens]:
    """Answers without cuts, by prompt."""
    await rig.engine.activate(NOT_CACHING)
    return {
        prompt: (await rig.ask(prompt, greedy(60), model=NOT_CACHING)).token_ids
        for prompt in (LONG, SHARING, CHAT)
    }


def num_cuts(rig: EngineRig) -> int:
    return rig.engine.snapshot().scheduling.layer_preemptions


async def cut(rig: EngineRig, batch: asyncio.Task[Answer]) -> None:
    """Demand a cut of an iteration with best-effort work until one is cut or *batch* ends."""
    before = num_cuts(rig)
    while num_cuts(rig) == before and not batch.done():
        await rig.engine.preempt_now()
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("model", [NOT_CACHING, CACHING])
async def test_twenty_cuts_in_one_prefill_change_no_answer(
    rig: EngineRig, undisturbed: dict[Tokens, Tokens], model: ModelName
) -> None:
    await rig.engine.activate(model)
    for _ in range(ROUNDS):
        await rig.engine.clear_caches()
        before = rig.engine.snapshot().scheduling
        rig.engine.drain_iterations()
        batch, chat = await answers_under_cuts(rig, model)
        await rig.settled()
        after = rig.engine.snapshot().scheduling
        iterations = rig.engine.drain_iterations()
        sharing = await rig.ask(SHARING, greedy(60), model=model)

        assert undisturbed[LONG] == batch
        assert undisturbed[CHAT] == chat
        assert undisturbed[SHARING] == sharing.token_ids
        assert (sharing.cached_tokens > 1500) is (model == CACHING)
        # Telemetry counts each computed token once and no dropped work.
        computed = sum(iteration.compute_tokens for iteration in iterations)
        assert computed == len(LONG) + 59 + len(CHAT) + 59
        if after.layer_preemptions - before.layer_preemptions >= NUM_CUTS:
            break

    assert after.layer_preemptions - before.layer_preemptions >= NUM_CUTS
    assert after.dropped_tokens - before.dropped_tokens > NUM_CUTS
    assert after.yield_s > before.yield_s


async def answers_under_cuts(rig: EngineRig, model: ModelName) -> tuple[Tokens, Tokens]:
    """
    A long best-effort answer under twenty cuts, and a concurrent chat request.

    On a busy machine the answer may end after fewer cuts.
    """
    begun = asyncio.Event()
    request = rig.request(CHAT, greedy(60), model=model, slo=PATIENT, arrived_at=time.time())
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        chat = group.create_task(rig.answer(request, begun))
        await begun.wait()
        batch = group.create_task(rig.ask(LONG, greedy(60), model=model))
        for _ in range(NUM_CUTS):
            await cut(rig, batch)
    return batch.result().token_ids, chat.result().token_ids


async def test_a_request_that_would_be_late_cuts_the_running_iteration(
    rig: EngineRig, undisturbed: dict[Tokens, Tokens]
) -> None:
    await rig.engine.activate(NOT_CACHING)
    before = num_cuts(rig)
    answers: list[Tokens] = []
    # A request may come between two iterations, or after the last safepoint of one.
    for _ in range(HASTY_ROUNDS):
        answers += await hasty_answers(rig)
        if num_cuts(rig) > before:
            break

    assert {undisturbed[CHAT][:2], undisturbed[LONG][:2]} == set(answers)
    assert num_cuts(rig) > before


async def hasty_answers(rig: EngineRig) -> list[Tokens]:
    """
    Answers to a long best-effort prompt and to interactive requests that cannot wait for it.

    The TTFT target is half of the longest iteration measured before, under the machine's current
    load. So a request that arrives in the first half of an iteration must cut the iteration.
    """
    rig.engine.drain_iterations()
    answers = [(await rig.ask(LONG, greedy(2), model=NOT_CACHING)).token_ids]
    longest_s = max(iteration.duration_s for iteration in rig.engine.drain_iterations())
    hasty = Slo(ttft_s=0.5 * longest_s, tbt_s=1)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        batch = group.create_task(rig.ask(LONG, greedy(2), model=NOT_CACHING))
        while not batch.done():
            await asyncio.sleep(0.02)
            request = rig.request(
                CHAT, greedy(2), model=NOT_CACHING, slo=hasty, arrived_at=time.time()
            )
            answers.append((await rig.answer(request)).token_ids)
    return [*answers, batch.result().token_ids]


async def test_requests_in_time_or_without_targets_cut_no_iteration(rig: EngineRig) -> None:
    await rig.engine.activate(NOT_CACHING)
    before = num_cuts(rig)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(rig.ask(LONG, greedy(2), model=NOT_CACHING))
        for slo in (PATIENT, Slo(), PATIENT):
            await asyncio.sleep(0.02)
            await rig.ask(CHAT, greedy(2), model=NOT_CACHING, slo=slo, arrived_at=time.time())

    assert num_cuts(rig) == before


async def test_nothing_is_dropped_without_best_effort_work(rig: EngineRig) -> None:
    await rig.engine.activate(NOT_CACHING)
    assert await rig.engine.preempt_now() is False
    before = num_cuts(rig)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        task = group.create_task(
            rig.ask(LONG, greedy(2), model=NOT_CACHING, slo=PATIENT, arrived_at=time.time())
        )
        while not task.done():
            assert await rig.engine.preempt_now() is False
            await asyncio.sleep(0.005)

    assert num_cuts(rig) == before


async def test_a_request_aborted_in_a_cut_iteration_leaves_no_wrong_block(
    rig: EngineRig, undisturbed: dict[Tokens, Tokens]
) -> None:
    await rig.engine.activate(CACHING)
    num_demanded = 0
    for number in range(3):
        prompt = prompt_of(2000, first=30 + number)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            request = rig.request(prompt, greedy(4), model=CACHING)
            answer = group.create_task(rig.answer(request))
            # On a busy machine the answer may end before its run is observed.
            while not (demanded := await rig.engine.preempt_now()) and not answer.done():
                await asyncio.sleep(0.001)
            num_demanded += demanded
            rig.engine.abort(request.request_id)
            await asyncio.sleep(0.005)
            await rig.engine.preempt_now()
        await rig.settled()
        again = await rig.ask(prompt, greedy(20), model=CACHING)
        await rig.engine.activate(NOT_CACHING)
        expected = await rig.ask(prompt, greedy(20), model=NOT_CACHING)
        await rig.engine.activate(CACHING)

        assert expected.token_ids == again.token_ids
    assert num_demanded > 0


async def test_a_request_that_shares_dropped_blocks_is_dropped_with_them(rig: EngineRig) -> None:
    """Two requests that vLLM admits in one iteration share blocks which it computes."""
    await rig.engine.activate(CACHING)
    before = rig.engine.snapshot().scheduling.preempted
    # Short, so that a pair fits into one iteration with any budget.
    whole = [prompt_of(80, first=100 + index) for index in range(3)]
    found = await answers_after_a_cut(
        rig, [part for prompt in whole for part in (prompt, prompt[:60])]
    )
    preempted = rig.engine.snapshot().scheduling.preempted - before
    await rig.engine.activate(NOT_CACHING)
    expected = {
        prompt: (await rig.ask(prompt, greedy(10), model=NOT_CACHING)).token_ids for prompt in found
    }

    assert expected == found
    assert preempted > 0


async def answers_after_a_cut(rig: EngineRig, prompts: list[Tokens]) -> dict[Tokens, Tokens]:
    """
    Answers of best-effort requests that begin in one iteration, which is cut.

    The iteration is cut because an urgent request is announced, which never arrives.
    """
    assert isinstance(rig.engine, VllmEngine)
    monitor = rig.engine._telemetry.monitor(CACHING)
    assert monitor is not None
    before = rig.engine.snapshot().scheduling.preempted
    request = rig.request(CHAT, greedy(500), model=CACHING, slo=PATIENT, arrived_at=time.time())
    alone, many = (SchedulingParameters(token_budget=CHUNK_TOKENS, max_running=n) for n in (1, 64))
    begun = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        # Until all requests have arrived, only this request runs; it has a target, so it is never
        # cut.
        await rig.engine.set_scheduling(alone)
        chat = group.create_task(rig.answer(request, begun))
        await begun.wait()
        tasks = {
            prompt: group.create_task(rig.ask(prompt, greedy(10), model=CACHING))
            for prompt in prompts
        }
        while rig.engine.snapshot().waiting < len(prompts) and not chat.done():
            await asyncio.sleep(0.001)
        monitor.announce(urgent())
        await rig.engine.set_scheduling(many)
        while rig.engine.snapshot().scheduling.preempted == before and not all(
            task.done() for task in tasks.values()
        ):
            monitor.announce(urgent())
            await asyncio.sleep(0.001)
        rig.engine.abort(request.request_id)
    return {prompt: task.result().token_ids for prompt, task in tasks.items()}


def urgent() -> Wish:
    """A request for which every iteration with best-effort work is cut."""
    now = time.monotonic()
    return Wish(announced_at=now, demand=1, deadline_at=now + 1, online_s=1e6, prefill_s=0.0)


async def test_compiled_models_are_refused_with_the_reason(rig: EngineRig) -> None:
    with pytest.raises(EngineError, match="compiled models"):
        await rig.engine.activate(COMPILED)
