"""KV checkpoints on real vLLM restore every full block, under several loads."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from ops.engine_runs import generate
from services.agent.backends.totals import CheckpointTotals
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import Tokens
from tests.contract.engine.engines import EngineRig, greedy, prompt_of
from tests.contract.vllm.checkpointed_engines import checkpointing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]

BLOCK_TOKENS = 32
NUM_BLOCKS = 72
"""Number of blocks of the engines' KV memory; vLLM reserves one of them."""
NUM_OUTPUT = 90
CACHING = ModelName("caching")
NOT_CACHING = ModelName("not-caching")
ROUNDS = 5
"""Maximum number of attempts until all aborts precede the answers' ends."""
LEAST_SHARE = 0.95
"""Minimum share of restored blocks among full blocks."""
PATIENT = Slo(ttft_s=20, tbt_s=1)


@dataclass(frozen=True)
class Asked:
    """A request that is aborted after *cut* tokens, or a few more."""

    prompt: Tokens
    cut: int


def family(shared: int, *own: int) -> list[Asked]:
    """Prompts that begin with the same *shared* tokens."""
    head = prompt_of(shared, first=400)
    return [Asked(head + prompt_of(each, first=30 + each), 9) for each in own]


LOADS: dict[str, list[Asked]] = {
    "one block and a token": [Asked(prompt_of(33, first=1), 1)],
    "a block but for a token": [Asked(prompt_of(31, first=2), 1)],
    "whole blocks": [Asked(prompt_of(512, first=3), 1)],
    "a token less": [Asked(prompt_of(511, first=4), 1)],
    "a token more": [Asked(prompt_of(513, first=5), 1)],
    "blocks that decoding filled": [Asked(prompt_of(40, first=6), 80)],
    "as long as the model takes": [Asked(prompt_of(930, first=7), 30)],
    "several at once": [Asked(prompt_of(100 + 70 * n, first=50 + n), 3 + 11 * n) for n in range(5)],
    "a shared prefix that ends inside a block": family(300, 20, 90, 150, 260),
    "a shared prefix of whole blocks": family(320, 1, 64, 200),
    "the same prompt twice": [Asked(prompt_of(450, first=8), cut) for cut in (5, 60)],
}


def entries(base: ModelEntry) -> tuple[ModelEntry, ...]:
    def variant(name: ModelName, **fields: Any) -> ModelEntry:
        limits = {"max_num_batched_tokens": 256, "num_gpu_blocks_override": NUM_BLOCKS}
        return msgspec.structs.replace(
            base,
            name=name,
            max_model_len=1024,
            engine_args={"max_model_len": 1024} | limits | fields,
        )

    return variant(CACHING), variant(NOT_CACHING, enable_prefix_caching=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineRig]:
    async with checkpointing(tmp_path_factory.mktemp("models"), entries) as running:
        yield running


async def flood(rig: EngineRig, model: ModelName) -> None:
    """Overwrite all of the engine's KV memory with requests that are not checkpointed."""
    for first in range(200, 200 + 1 + NUM_BLOCKS * BLOCK_TOKENS // 1000):
        await rig.ask(prompt_of(1000, first=first), greedy(2), model=model)


async def aborted(rig: EngineRig, model: ModelName, load: list[Asked]) -> list[Tokens]:
    """Run the requests of *load*, abort all of them, and return the progress of each."""
    for _ in range(ROUNDS):
        await rig.engine.clear_caches()
        rig.engine.drain_iterations()
        progress = await asyncio.gather(*(cut_short(rig, model, asked) for asked in load))
        await rig.over(model)
        decodes = sum(each.num_decodes for each in rig.engine.drain_iterations())
        # On a busy machine a request may have ended in the engine before its abort arrived, and
        # then leaves no copies. `ahead` is the number of tokens of all requests that the engine
        # generated and the test has not read.
        ahead = decodes - sum(len(done) - 1 for done in progress)
        if ahead < min(NUM_OUTPUT - len(done) for done in progress) - 1:
            return progress
    pytest.fail(f"in {ROUNDS} rounds answers may have ended before they were aborted")


async def cut_short(rig: EngineRig, model: ModelName, asked: Asked) -> Tokens:
    """Run *asked* up to its cut, abort it, and return its progress."""
    request = rig.request(asked.prompt, greedy(NUM_OUTPUT), model=model, checkpointed=True)
    progress: Tokens = ()
    async for output in generate(rig.engine, request):
        progress += output.token_ids
        if len(progress) >= asked.cut:
            break
    rig.engine.abort(request.request_id)
    return progress


def full_blocks(sequences: list[Tokens]) -> int:
    """
    Number of distinct full blocks of *sequences*; equal prefixes share their blocks.

    The last token of a sequence has no KV, because it was not yet the input of an iteration.
    """
    blocks = set()
    for tokens in sequences:
        full = (len(tokens) - 1) // BLOCK_TOKENS
        blocks |= {tokens[: BLOCK_TOKENS * (number + 1)] for number in range(full)}
    return len(blocks)


def loaded(before: CheckpointTotals, after: CheckpointTotals) -> int:
    return after.restored_blocks - before.restored_blocks


@pytest.mark.parametrize("model", [CACHING, NOT_CACHING])
@pytest.mark.parametrize("load", LOADS)
async def test_aborted_requests_are_restored(rig: EngineRig, model: ModelName, load: str) -> None:
    """Up to three rounds, because on a busy machine some blocks may not be overwritten."""
    for _ in range(2):
        with contextlib.suppress(_TooFewError):
            return await comes_back(rig, model, load)
    return await comes_back(rig, model, load)


class _TooFewError(Exception):
    """Fewer blocks were restored than existed."""


async def comes_back(rig: EngineRig, model: ModelName, load: str) -> None:
    """
    Abort and resume the requests of *load*; compare loaded blocks with existing full blocks.

    Without a prefix cache, each request loads its blocks. With a prefix cache, a common prefix is
    loaded once, and other requests find it in the cache.

    Raises:
        _TooFewError: Too few blocks were loaded, or too many tokens were recomputed.
    """
    await rig.engine.activate(model)
    await rig.engine.clear_caches()
    whole = [
        (await rig.ask(asked.prompt, greedy(NUM_OUTPUT), model=model)).token_ids
        for asked in LOADS[load]
    ]
    progress = await aborted(rig, model, LOADS[load])
    await flood(rig, model)
    await rig.settled()
    before = rig.engine.snapshot().checkpoints
    rig.engine.drain_iterations()
    answers = await asyncio.gather(
        *(
            rig.ask(asked.prompt, greedy(NUM_OUTPUT), model=model, progress=done)
            for asked, done in zip(LOADS[load], progress, strict=True)
        )
    )
    await rig.settled()
    sequences = [asked.prompt + done for asked, done in zip(LOADS[load], progress, strict=True)]
    each = sum((len(tokens) - 1) // BLOCK_TOKENS for tokens in sequences)
    there_were = full_blocks(sequences) if model == CACHING else each
    from_copies = loaded(before, rig.engine.snapshot().checkpoints)
    computed = sum(it.compute_tokens for it in rig.engine.drain_iterations())
    needed = sum(len(tokens) for tokens in sequences) - each * BLOCK_TOKENS
    # The last token of each answer is never an input.
    needed += sum(NUM_OUTPUT - len(done) - 1 for done in progress)

    assert [
        done + answer.token_ids for done, answer in zip(progress, answers, strict=True)
    ] == whole
    assert from_copies <= each
    if from_copies < LEAST_SHARE * there_were:
        raise _TooFewError(f"{from_copies} of {there_were} full blocks were loaded from copies")
    # The restored blocks are not recomputed, except for the tolerated share.
    if computed - needed > (1 - LEAST_SHARE) * each * BLOCK_TOKENS:
        raise _TooFewError(f"{computed} tokens were computed although {needed} sufficed")


@pytest.mark.parametrize("model", [CACHING, NOT_CACHING])
@pytest.mark.parametrize(
    "load",
    ["whole blocks", "several at once", "as long as the model takes"],
)
async def test_preempted_requests_are_restored(rig: EngineRig, model: ModelName, load: str) -> None:
    """
    Urgent requests take the memory of the whole load while it decodes.

    The KV of a preempted request is restored or recomputed. Only the last, incomplete block of each
    request may be recomputed.
    """
    await rig.engine.activate(model)
    whole = [
        (await rig.ask(asked.prompt, greedy(NUM_OUTPUT), model=model)).token_ids
        for asked in LOADS[load]
    ]
    loads = back = preempted = again = 0
    while preempted < 2 and loads < 8:
        loads += 1
        await rig.engine.clear_caches()
        before = rig.engine.snapshot()
        rig.engine.drain_iterations()
        answers = await pressed(rig, model, LOADS[load], loads)
        await rig.settled()
        after = rig.engine.snapshot()
        assert answers == whole
        back += loaded(before.checkpoints, after.checkpoints)
        preempted += after.scheduling.preempted - before.scheduling.preempted
        needed = sum(len(asked.prompt) + NUM_OUTPUT - 1 for asked in LOADS[load])
        needed += 2 * URGENT_TOKENS
        computed = sum(it.compute_tokens for it in rig.engine.drain_iterations())
        again += computed - needed
    lost = max(0, again - preempted * (BLOCK_TOKENS - 1)) / BLOCK_TOKENS

    assert preempted >= 1
    assert back + lost > 0
    assert lost <= (1 - LEAST_SHARE) * (back + lost)


URGENT_TOKENS = 1000


async def pressed(rig: EngineRig, model: ModelName, load: list[Asked], number: int) -> list[Tokens]:
    """Answers to *load*; after all have begun, two urgent requests need the whole KV memory."""
    begun = [asyncio.Event() for _ in load]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        runs = [
            group.create_task(
                rig.answer(
                    rig.request(
                        asked.prompt,
                        greedy(NUM_OUTPUT),
                        model=model,
                        checkpointed=True,
                        arrived_at=time.time(),
                    ),
                    event,
                )
            )
            for asked, event in zip(load, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        for index in range(2):
            group.create_task(
                rig.ask(
                    prompt_of(URGENT_TOKENS, first=300 + 2 * number + index),
                    greedy(1),
                    model=model,
                    slo=PATIENT,
                    arrived_at=time.time(),
                )
            )
    return [run.result().token_ids for run in runs]
