"""KV checkpoints on real vLLM: restored KV is correct and nearly complete, within its budget."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shared.contracts.base import ModelName
from shared.contracts.errors import EngineError
from shared.contracts.qos import Slo
from shared.contracts.requests import Tokens
from tests.contract.engine.engines import EngineRig, greedy, prompt_of
from tests.contract.vllm.checkpointed_engines import (
    ANSWER_TOKENS,
    BLOCK_BYTES,
    BLOCK_TOKENS,
    CACHING,
    FAULTY,
    MOST_TOKENS,
    NOT_CACHING,
    SLOW,
    SMALL,
    SMALL_BLOCKS,
    TOO_SMALL,
    Measured,
    begun,
    checkpointing,
    flood,
    variants,
)

# One engine host for the whole file, and one file for all tests: starting vLLM takes long.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]

PATIENT = Slo(ttft_s=20, tbt_s=1)
ROUNDS = 5
"""Maximum number of attempts until an abort comes in time."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineRig]:
    async with checkpointing(tmp_path_factory.mktemp("models"), variants) as running:
        yield running


@pytest.mark.parametrize("model", [CACHING, NOT_CACHING])
async def test_an_aborted_request_resumes_with_its_kv_restored(
    rig: EngineRig, model: ModelName
) -> None:
    """With 800 tokens of context or more, all full blocks up to the progress are restored."""
    await rig.engine.activate(model)
    prompt = prompt_of(800, first=1)
    whole = await rig.ask(prompt, greedy(100), model=model)
    await rig.engine.clear_caches()
    for tokens in (1, 31, 60):
        progress = await begun(rig, prompt, tokens, model)
        await flood(rig, model)
        await rig.settled()
        measured = Measured(rig)
        rest = await rig.ask(prompt, greedy(100), model=model, progress=progress, checkpointed=True)

        assert whole.token_ids == progress + rest.token_ids
        # The last token has no KV: it was not yet the input of an iteration.
        full = (800 + len(progress) - 1) // BLOCK_TOKENS
        assert measured.copied.restored_blocks == full
        assert rest.cached_tokens == full * BLOCK_TOKENS


@pytest.mark.parametrize("model", [CACHING, NOT_CACHING])
async def test_an_abort_inside_a_prefill_keeps_the_computed_part(
    rig: EngineRig, model: ModelName
) -> None:
    await rig.engine.activate(model)
    prompt = prompt_of(900, first=2)
    for _ in range(ROUNDS):
        await rig.engine.clear_caches()
        computed, host_kv_bytes = await aborted_early(rig, prompt, model)
        # On a busy machine the answer may have ended before the abort; the request then leaves no
        # copies.
        if computed < 900 + ANSWER_TOKENS - 1:
            break
    full = computed // BLOCK_TOKENS

    assert computed < 900 + ANSWER_TOKENS - 1, "no abort came before the end of its answer"
    assert 0 < host_kv_bytes == full * BLOCK_BYTES
    await flood(rig, model)
    again = await rig.ask(prompt, greedy(4), model=model)
    # On a busy machine the abort may have come after the prefill.
    assert again.cached_tokens == min(full, 899 // BLOCK_TOKENS) * BLOCK_TOKENS


async def aborted_early(rig: EngineRig, prompt: Tokens, model: ModelName) -> tuple[int, int]:
    """
    Abort a request during its prefill; return its computed tokens and the bytes of its copies.
    """
    request = rig.request(prompt, greedy(ANSWER_TOKENS), model=model, checkpointed=True)
    measured = Measured(rig)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        run = group.create_task(rig.answer(request))
        while measured.now.kv_utilization * MOST_TOKENS < 200 and not run.done():
            await asyncio.sleep(0.001)
        rig.engine.abort(request.request_id)
    others = await rig.over(model)
    return measured.computed() - others, measured.now.host_kv_bytes


@pytest.mark.parametrize("model", [CACHING, NOT_CACHING])
async def test_preempted_requests_regain_their_kv_and_answer_unchanged(
    rig: EngineRig, model: ModelName
) -> None:
    """
    Urgent requests repeatedly take the memory of a request with at least 850 tokens of context.

    At least 95 % of the blocks that were full at a preemption are restored, from host memory or
    from a prefix cache. The number of other blocks follows from recomputed tokens, without the
    partial block that each preemption costs.
    """
    await rig.engine.activate(model)
    await rig.engine.clear_caches()
    measured = Measured(rig)
    answers: list[Tokens] = []
    async with asyncio.timeout(60):
        # On a busy machine the urgent request may come too late.
        while measured.preempted < 3:
            answers.append(await interrupted(rig, model, len(answers)))
    await rig.settled()
    restored, preempted = measured.copied.restored_blocks, measured.preempted
    needed = len(answers) * (850 + 100 - 1 + 700)
    again = measured.computed() - needed

    lost = max(0, again - preempted * (BLOCK_TOKENS - 1)) / BLOCK_TOKENS
    assert restored > 0
    assert lost <= 0.05 * (lost + restored)
    alone = [
        (await rig.ask(prompt_of(850, first=30 + number), greedy(100), model=model)).token_ids
        for number in range(len(answers))
    ]
    assert alone == answers


async def interrupted(rig: EngineRig, model: ModelName, number: int) -> Tokens:
    """Answer of a long request; after its start, an urgent request needs most of the memory."""
    begun = asyncio.Event()
    request = rig.request(
        prompt_of(850, first=30 + number),
        greedy(100),
        model=model,
        checkpointed=True,
        arrived_at=time.time(),
    )
    async with asyncio.TaskGroup() as group:
        run = group.create_task(rig.answer(request, begun))
        await begun.wait()
        await rig.ask(
            prompt_of(700, first=300 + number),
            greedy(1),
            model=model,
            slo=PATIENT,
            arrived_at=time.time(),
        )
    return run.result().token_ids


async def test_the_copies_stay_within_their_budget(rig: EngineRig) -> None:
    """Requests grow beyond the device's memory, so that vLLM preempts requests."""
    await rig.engine.activate(SMALL)
    prompts = [prompt_of(300, first=80 + index) for index in range(4)]
    alone = [(await rig.ask(prompt, greedy(60), model=SMALL)).token_ids for prompt in prompts]
    measured = Measured(rig)
    used = []
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        answers = [
            group.create_task(rig.ask(prompt, greedy(60), model=SMALL, checkpointed=True))
            for prompt in prompts
        ]
        while not all(task.done() for task in answers):
            used.append(measured.now.host_kv_bytes)
            await asyncio.sleep(0.002)
    # The load includes a sequence that exceeds the budget of copies.
    long = prompt_of(900, first=90)
    whole = (await rig.ask(long, greedy(100), model=SMALL)).token_ids
    progress = await begun(rig, long, 2, SMALL)
    rest = await rig.ask(long, greedy(100), model=SMALL, progress=progress)

    assert measured.now.host_kv_capacity_bytes == SMALL_BLOCKS * BLOCK_BYTES
    assert max(used) <= SMALL_BLOCKS * BLOCK_BYTES
    assert alone == [task.result().token_ids for task in answers]
    assert rest.cached_tokens == SMALL_BLOCKS * BLOCK_TOKENS
    assert whole == progress + rest.token_ids


async def test_clearing_drops_all_copies_including_those_of_parked_engines(
    rig: EngineRig,
) -> None:
    prompt = prompt_of(300, first=3)
    for model in (CACHING, SMALL):
        await rig.engine.activate(model)
        await begun(rig, prompt, 2, model)
        await rig.settled()
        assert rig.engine.snapshot().host_kv_bytes > 0
    await rig.engine.clear_caches()
    for model in (SMALL, CACHING):
        await rig.engine.activate(model)
        assert rig.engine.snapshot().host_kv_bytes == 0
        assert (await rig.ask(prompt, greedy(2), model=model)).cached_tokens == 0


async def test_copies_that_cannot_be_loaded_are_recomputed(rig: EngineRig) -> None:
    """`faulty_kv` loses every third copy."""
    await rig.engine.activate(FAULTY)
    prompt = prompt_of(800, first=4)
    whole = await rig.ask(prompt, greedy(100), model=FAULTY)
    await rig.engine.clear_caches()
    progress = await begun(rig, prompt, 20, FAULTY)
    await flood(rig, FAULTY)
    await rig.settled()
    measured = Measured(rig)
    rest = await rig.ask(prompt, greedy(100), model=FAULTY, progress=progress)

    assert whole.token_ids == progress + rest.token_ids
    assert measured.copied.restored_blocks > 0


async def test_no_layer_is_computed_before_its_copies_are_loaded(rig: EngineRig) -> None:
    """`slow_kv` takes 50 ms per layer; another request decodes in the same iterations."""
    await rig.engine.activate(SLOW)
    prompts = [prompt_of(length, first=60 + length) for length in (800, 65)]
    chat = prompt_of(40, first=300)
    whole = [(await rig.ask(prompt, greedy(100), model=SLOW)).token_ids for prompt in prompts]
    alone = (await rig.ask(chat, greedy(200), model=SLOW)).token_ids
    await rig.engine.clear_caches()
    progress = [await begun(rig, prompt, 20, SLOW) for prompt in prompts]
    await flood(rig, SLOW)
    before = rig.engine.snapshot().checkpoints
    async with asyncio.TaskGroup() as group:
        other = group.create_task(rig.ask(chat, greedy(200), model=SLOW))
        rests = [
            group.create_task(rig.ask(prompt, greedy(100), model=SLOW, progress=done))
            for prompt, done in zip(prompts, progress, strict=True)
        ]
    after = rig.engine.snapshot().checkpoints

    assert whole == [done + r.result().token_ids for done, r in zip(progress, rests, strict=True)]
    assert other.result().token_ids == alone
    assert after.restored_blocks > before.restored_blocks
    assert after.restore_s - before.restore_s > 0.05


async def test_a_budget_below_one_block_is_refused_with_the_reason(rig: EngineRig) -> None:
    with pytest.raises(EngineError, match="do not hold one block of 65536"):
        await rig.engine.activate(TOO_SMALL)
