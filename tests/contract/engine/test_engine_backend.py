"""Contract of every `EngineBackend`, following its docstrings."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from ops.engine_runs import generate
from services.agent.backends.base import EngineEvent, NewOutput, SchedulingParameters
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import EngineError
from shared.contracts.requests import FinishReason, Sampling, Tokens
from shared.contracts.telemetry import Capability, Residency
from tests.brokers import eventually
from tests.contract.engine.engines import LLAMA, OTHER, RIGS, Answer, EngineRig, greedy, prompt_of

# One engine for the whole file, and one file for all tests: starting vLLM takes long. No test
# depends on another, since the `rig` fixture starts the engine before each.
pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER_TOKENS = 1000
"""Answer length of runs that are aborted."""
ABORTS = 5
"""Number of attempts to abort a run before its end, which may be early on a busy machine."""
ROUNDS = 5
"""Maximum number of attempts until an abort comes in time."""


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        "simulated",
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow]),
        pytest.param("vllm-policy", marks=pytest.mark.vllm),
        pytest.param("vllm-as-on-gpu", marks=[pytest.mark.vllm, pytest.mark.slow]),
        pytest.param("vllm-two-devices", marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
)
async def shared_rig(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineRig]:
    rig = RIGS[request.param](tmp_path_factory.mktemp("models"))
    yield rig
    await rig.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared_rig: EngineRig) -> EngineRig:
    await shared_rig.bring_up()
    return shared_rig


async def test_greedy_answers_are_deterministic(rig: EngineRig) -> None:
    first = await rig.ask(prompt_of(40), greedy(24))
    second = await rig.ask(prompt_of(40), greedy(24))

    assert first.token_ids == second.token_ids
    assert len(first.token_ids) == 24
    assert first.finish_reason is FinishReason.LENGTH


async def test_an_added_model_can_be_activated(rig: EngineRig) -> None:
    expected = await rig.ask(prompt_of(40), greedy(8))
    (entry,) = (each for each in rig.entries if each.name == LLAMA)
    added = ModelName("added")
    rig.engine.add(msgspec.structs.replace(entry, name=added))
    (state,) = (each for each in rig.engine.snapshot().models if each.model == added)

    assert state.residency is Residency.COLD
    await rig.engine.activate(added)
    answer = await rig.ask(prompt_of(40), greedy(8), model=added)
    assert len(answer.token_ids) == 8
    if rig.engine.identity.engine.startswith("vllm"):  # simulated answers differ by model
        assert answer.token_ids == expected.token_ids


async def test_a_removed_model_leaves_memory_also_if_it_is_active(rig: EngineRig) -> None:
    expected = await rig.ask(prompt_of(40), greedy(8))
    (entry,) = (each for each in rig.entries if each.name == LLAMA)
    removed = msgspec.structs.replace(entry, name=ModelName("removed"))
    rig.engine.add(removed)
    await rig.engine.activate(removed.name)
    begun = asyncio.Event()
    request = rig.request(prompt_of(40), greedy(ANSWER_TOKENS), model=removed.name)
    run = asyncio.ensure_future(rig.answer(request, begun))
    await begun.wait()
    with pytest.raises(EngineError, match="are running"):
        await rig.engine.remove(removed.name)
    rig.engine.abort(request.request_id)
    await run
    await rig.engine.remove(removed.name)

    assert rig.engine.snapshot().model is None
    assert removed.name not in {each.model for each in rig.engine.snapshot().models}
    with pytest.raises(EngineError, match="no model 'removed'"):
        await rig.engine.activate(removed.name)
    await rig.bring_up()
    assert (await rig.ask(prompt_of(40), greedy(8))).token_ids == expected.token_ids


async def test_run_that_is_past_its_end_gets_no_token(rig: EngineRig) -> None:
    ended = rig.request(prompt_of(40), greedy(8), expires_at=time.time() - 1.0)
    run = asyncio.ensure_future(rig.answer(ended))
    other = await rig.ask(prompt_of(40, first=3), greedy(8))
    rig.engine.abort(ended.request_id)

    assert len(other.token_ids) == 8
    assert (await run).token_ids == ()
    await rig.settled()


async def test_engine_stops_a_run_at_its_end_before_the_agent_aborts_it(rig: EngineRig) -> None:
    begun = asyncio.Event()
    request = rig.request(prompt_of(40), greedy(3000), expires_at=time.time() + 1.0)
    run = asyncio.ensure_future(rig.answer(request, begun))
    await begun.wait()
    # The agent still counts the run, since it is the one that ends it.
    await eventually(
        lambda: (rig.engine.snapshot().running, rig.engine.snapshot().kv_utilization) == (0, 0.0)
    )
    rig.engine.abort(request.request_id)
    answer = await run
    await rig.settled()

    assert 0 < len(answer.token_ids) < 3000
    assert answer.finish_reason is None


async def test_deadline_of_the_first_token_ends_no_run_that_has_one(rig: EngineRig) -> None:
    late_at = time.time() + 1.0
    answer = await rig.ask(prompt_of(40), greedy(1500), first_token_by=late_at)

    assert len(answer.token_ids) == 1500
    late = rig.request(prompt_of(40), greedy(8), first_token_by=time.time() - 1.0)
    run = asyncio.ensure_future(rig.answer(late))
    await rig.ask(prompt_of(40, first=3), greedy(8))
    rig.engine.abort(late.request_id)
    assert (await run).token_ids == ()


async def test_different_prompts_get_different_answers(rig: EngineRig) -> None:
    one = await rig.ask(prompt_of(40, first=1), greedy(24))
    other = await rig.ask(prompt_of(40, first=2), greedy(24))

    assert one.token_ids != other.token_ids


async def test_concurrent_answers_equal_those_of_single_requests(rig: EngineRig) -> None:
    prompts = [prompt_of(30 + 60 * index, first=100 + index) for index in range(4)]
    alone = [(await rig.ask(prompt, greedy(20))).token_ids for prompt in prompts]
    together = await asyncio.gather(*(rig.ask(prompt, greedy(20)) for prompt in prompts))

    assert alone == [answer.token_ids for answer in together]


async def test_a_repeated_prompt_is_partly_cached(rig: EngineRig) -> None:
    await rig.ask(prompt_of(300, first=77), greedy(2))
    again = await rig.ask(prompt_of(300, first=77), greedy(2))

    assert 200 < again.cached_tokens < 300


async def test_the_prefill_is_timed_from_its_first_chunk_to_the_first_token(rig: EngineRig) -> None:
    began = time.monotonic()
    alone = await rig.ask(prompt_of(500, first=81), greedy(1))
    took_s = time.monotonic() - began
    begun = asyncio.Event()
    reported: list[float] = []

    async def run() -> float:
        """
        Serve one request; set *begun* at its first output, and return the time to that output in
        seconds.
        """
        asked_at, first_s = time.monotonic(), 0.0
        async for output in generate(rig.engine, rig.request(prompt_of(40, first=82), greedy(60))):
            first_s = first_s or time.monotonic() - asked_at
            reported.append(output.prefill_s)
            begun.set()
        return first_s

    running = asyncio.create_task(run())
    await begun.wait()
    beside = await rig.ask(prompt_of(40, first=83), greedy(8))
    first_s = await running

    assert 0 < alone.prefill_s <= took_s
    # The time is reported once, with the first output.
    assert 0 < reported[0] <= first_s
    assert not any(reported[1:])
    assert beside.prefill_s > 0


@pytest.mark.parametrize("cut", [1, 9, 23])
async def test_an_answer_resumed_with_progress_equals_the_undisturbed_answer(
    rig: EngineRig, cut: int
) -> None:
    whole = (await rig.ask(prompt_of(70, first=5), greedy(24))).token_ids
    rest = await rig.ask(prompt_of(70, first=5), greedy(24), progress=whole[:cut])

    assert whole == whole[:cut] + rest.token_ids
    assert rest.finish_reason is FinishReason.LENGTH


async def test_resuming_a_complete_answer_only_sends_its_final(rig: EngineRig) -> None:
    whole = (await rig.ask(prompt_of(20), greedy(8))).token_ids
    rest = await rig.ask(prompt_of(20), greedy(8), progress=whole)

    assert (rest.token_ids, rest.finish_reason) == ((), FinishReason.LENGTH)


async def test_an_aborted_run_ends_without_a_reason_and_frees_its_memory(rig: EngineRig) -> None:
    async def aborted() -> Answer:
        request = rig.request(prompt_of(200, first=9), greedy(2000))
        begun = asyncio.Event()
        rig.engine.drain_iterations()
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            run = group.create_task(rig.answer(request, begun))
            await begun.wait()
            rig.engine.abort(request.request_id)
        return run.result()

    for _ in range(ABORTS):
        answer = await aborted()
        if answer.finish_reason is None:
            break

    assert answer.finish_reason is None
    assert 0 < len(answer.token_ids) < 2000
    await rig.settled()
    # Without the abort, the run frees its memory too, but after all of its tokens.
    assert sum(each.num_decodes for each in rig.engine.drain_iterations()) < 1999


async def test_a_run_without_a_reader_is_aborted(rig: EngineRig) -> None:
    async def ends_early() -> bool:
        outputs = generate(rig.engine, rig.request(prompt_of(200), greedy(2000)))
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]  # all backends use generators
        events: list[EngineEvent] = []
        rig.engine.listen(events.extend)
        await rig.settled()
        return not any(isinstance(event, NewOutput) and event.output.is_last for event in events)

    for _ in range(ABORTS):
        if await ends_early():
            return
    pytest.fail(f"the run continued to its last token {ABORTS} times")


async def test_aborting_an_unknown_request_does_nothing(rig: EngineRig) -> None:
    rig.engine.abort(RequestId("absent"))

    assert rig.engine.alive


async def test_a_stop_token_ends_the_answer_and_is_part_of_it(rig: EngineRig) -> None:
    whole = (await rig.ask(prompt_of(50, first=3), greedy(24))).token_ids
    stop = whole[10]
    answer = await rig.ask(prompt_of(50, first=3), greedy(24), stop_token_ids=(stop,))

    assert whole[: whole.index(stop) + 1] == answer.token_ids
    assert answer.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("offset", [0, 4])
async def test_min_tokens_count_from_the_start_of_the_answer(rig: EngineRig, offset: int) -> None:
    whole = (await rig.ask(prompt_of(50, first=3), greedy(24))).token_ids
    answer = await rig.ask(
        prompt_of(50, first=3),
        greedy(24, min_tokens=12),
        stop_token_ids=tuple(set(whole)),
        progress=whole[:offset],
    )

    assert 12 <= offset + len(answer.token_ids) <= 24
    assert not set(answer.token_ids[: 12 - offset]) & set(whole)


async def test_the_context_limit_ends_the_answer(rig: EngineRig) -> None:
    answer = await rig.ask(prompt_of(4090), greedy(500))

    assert (len(answer.token_ids), answer.finish_reason) == (6, FinishReason.LENGTH)


async def test_a_seed_makes_random_answers_repeatable(rig: EngineRig) -> None:
    def random(seed: int) -> Sampling:
        return Sampling(max_tokens=24, seed=seed, ignore_eos=True)

    first, second, other = [
        (await rig.ask(prompt_of(40), random(seed))).token_ids for seed in (1, 1, 2)
    ]

    assert first == second
    assert first != other


async def test_an_answer_may_end_with_eos(rig: EngineRig) -> None:
    answers = await asyncio.gather(
        *(
            rig.ask(prompt_of(20, first=index), Sampling(max_tokens=400, seed=index))
            for index in range(16)
        )
    )

    assert FinishReason.STOP in {answer.finish_reason for answer in answers}


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (prompt_of(4096), {}),
        (prompt_of(5000), {}),
        ((), {}),
        ((3, 512), {}),
        ((3, -1), {}),
        ((3,), {"adapter": "lora"}),
        ((3,), {"model": OTHER}),
    ],
    ids=["full", "over-long", "empty", "vocabulary", "negative", "adapter", "inactive"],
)
async def test_a_bad_request_fails_and_the_engine_survives(
    rig: EngineRig, prompt: tuple[int, ...], fields: dict[str, Any]
) -> None:
    with pytest.raises(EngineError) as refused:
        await rig.ask(prompt, greedy(200), **fields)

    assert not refused.value.engine_dead
    assert rig.engine.alive
    assert len((await rig.ask((3, 20), greedy(2))).token_ids) == 2


async def test_an_unknown_model_is_refused(rig: EngineRig) -> None:
    with pytest.raises(EngineError, match="nothing-like-it"):
        await rig.engine.activate(ModelName("nothing-like-it"))


async def test_activating_the_active_model_takes_no_time(rig: EngineRig) -> None:
    assert await rig.engine.activate(LLAMA) == 0.0


async def test_no_other_model_is_activated_while_requests_run(rig: EngineRig) -> None:
    begun = asyncio.Event()
    # The answer is long enough to be in progress when the other model is activated.
    request = rig.request(prompt_of(40), greedy(3000))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(rig.answer(request, begun))
        await begun.wait()
        with pytest.raises(EngineError, match="running"):
            await rig.engine.activate(OTHER)
        rig.engine.abort(request.request_id)

    assert rig.engine.snapshot().model == LLAMA


async def test_a_model_answers_as_before_after_reactivation(rig: EngineRig) -> None:
    before = await rig.ask(prompt_of(60), greedy(16))
    await rig.engine.activate(OTHER)
    other = await rig.ask(prompt_of(60), greedy(16), model=OTHER)
    parked = {state.model: state.residency for state in rig.engine.snapshot().models}
    await rig.engine.activate(LLAMA)
    after = await rig.ask(prompt_of(60), greedy(16))

    assert before.token_ids == after.token_ids
    assert before.token_ids != other.token_ids
    assert parked[LLAMA] is not Residency.ACTIVE
    assert parked[OTHER] is Residency.ACTIVE


async def test_a_model_is_warmed_and_cooled(rig: EngineRig) -> None:
    async def residency() -> Residency:
        states = rig.engine.snapshot().models
        return next(each.residency for each in states if each.model == OTHER)

    await rig.engine.cool(OTHER)
    await rig.engine.cool(OTHER)
    assert await residency() is Residency.COLD
    await rig.engine.warm(OTHER)
    await rig.engine.warm(OTHER)
    assert await residency() is Residency.WARM
    await rig.engine.cool(OTHER)
    assert await residency() is Residency.COLD


async def test_the_active_model_stays_in_memory(rig: EngineRig) -> None:
    await rig.engine.warm(LLAMA)
    with pytest.raises(EngineError, match="active"):
        await rig.engine.cool(LLAMA)
    for unknown in (rig.engine.warm, rig.engine.cool):
        with pytest.raises(EngineError, match="nothing-like-it"):
            await unknown(ModelName("nothing-like-it"))


async def test_the_snapshot_counts_requests_and_memory(rig: EngineRig) -> None:
    begun = asyncio.Event()
    request = rig.request(prompt_of(2000), greedy(2000))
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(rig.answer(request, begun))
        await begun.wait()
        busy = rig.engine.snapshot()
        rig.engine.abort(request.request_id)

    assert (busy.model, busy.running, busy.waiting) == (LLAMA, 1, 0)
    assert busy.kv_capacity_tokens >= 4096
    assert 2000 / busy.kv_capacity_tokens <= busy.kv_utilization <= 1


async def test_iterations_add_up_to_the_work(rig: EngineRig) -> None:
    assert Capability.TELEMETRY in rig.engine.identity.capabilities
    await rig.settled()
    rig.engine.drain_iterations()
    answer = await rig.ask(prompt_of(100, first=222), greedy(10))
    await rig.settled()
    iterations = rig.engine.drain_iterations()

    computed = sum(iteration.compute_tokens for iteration in iterations)
    assert 100 - answer.cached_tokens + 9 == computed
    assert sum(iteration.num_decodes for iteration in iterations) == 9
    assert [100 + index for index in range(9)] == [it.context_tokens for it in iterations[-9:]]
    assert all(iteration.duration_s > 0 for iteration in iterations)
    # For any chunks, each prompt token attends to all tokens before it, and half to itself.
    pairs = sum(iteration.prefill_pairs for iteration in iterations)
    assert pairs == (100**2 - answer.cached_tokens**2) / 2
    assert all(iteration.prefill_pairs == 0 for iteration in iterations[-9:])


async def test_the_token_budget_limits_iterations(rig: EngineRig) -> None:
    assert Capability.SCHEDULING in rig.engine.identity.capabilities
    await rig.engine.set_scheduling(SchedulingParameters(token_budget=64, max_running=4))
    await rig.settled()
    rig.engine.drain_iterations()
    await rig.ask(prompt_of(400, first=333), greedy(4))
    largest = max(it.compute_tokens for it in rig.engine.drain_iterations())
    await rig.engine.set_scheduling(SchedulingParameters(token_budget=512, max_running=64))

    assert largest == 64


def is_simulated(rig: EngineRig) -> bool:
    return rig.engine.identity.engine == "simulated"


def copies_kv(rig: EngineRig) -> bool:
    """Return whether the engine has checkpoints; engines on a GPU or on several devices do not."""
    return Capability.CHECKPOINT in rig.engine.identity.capabilities


@pytest.fixture
def copying(rig: EngineRig) -> EngineRig:
    """The rig, if its engine has checkpoints."""
    if not copies_kv(rig):
        pytest.skip(f"the engine on {rig.engine.identity.device} has no checkpoints")
    return rig


@dataclass(frozen=True)
class Aborted:
    """An aborted, checkpointed run with copies of its KV in host memory."""

    progress: Tokens
    computed_tokens: int
    """Number of tokens with KV; may exceed *progress*, which the test has read."""
    saved_blocks: int
    """Number of blocks copied during the run and at its end."""


async def begin_and_abort(rig: EngineRig, prompt: Tokens, tokens: int) -> Aborted:
    """Run a checkpointed request for *tokens* generated tokens or a few more, then abort it."""
    for _ in range(ROUNDS):
        await rig.engine.clear_caches()
        await rig.over()
        rig.engine.drain_iterations()
        before = rig.engine.snapshot().checkpoints.saved_blocks
        request = rig.request(prompt, greedy(ANSWER_TOKENS), checkpointed=True)
        progress: list[int] = []
        async for output in generate(rig.engine, request):
            progress += output.token_ids
            if len(progress) >= tokens:
                break
        rig.engine.abort(request.request_id)
        others = await rig.over()
        iterations = rig.engine.drain_iterations()
        computed = sum(each.compute_tokens for each in iterations) - others
        if is_simulated(rig):
            computed -= 1  # the iteration during which the abort arrived gives no output
        # On a busy machine the answer may have ended in the engine before the abort arrived; it
        # then leaves no copies.
        if sum(each.num_decodes for each in iterations) < ANSWER_TOKENS - 2:
            saved = rig.engine.snapshot().checkpoints.saved_blocks - before
            return Aborted(tuple(progress), computed, saved)
    pytest.fail(f"{ROUNDS} answers ended before they were aborted")


async def test_only_kv_of_checkpointed_requests_is_copied(copying: EngineRig) -> None:
    rig = copying
    await rig.engine.clear_caches()
    before = rig.engine.snapshot().checkpoints.saved_blocks
    await rig.ask(prompt_of(300, first=91), greedy(8))
    await rig.over()
    not_asked_for = rig.engine.snapshot().checkpoints.saved_blocks - before
    aborted = await begin_and_abort(rig, prompt_of(300, first=92), 30)
    block_tokens = 16 if is_simulated(rig) else 32
    state = rig.engine.snapshot()

    assert not_asked_for == 0
    # The last token that the test read need not have been computed as input.
    assert aborted.computed_tokens >= 300 + len(aborted.progress) - 1
    assert aborted.saved_blocks == aborted.computed_tokens // block_tokens
    assert 0 < state.host_kv_bytes < state.host_kv_capacity_bytes
    assert state.host_kv_bytes % aborted.saved_blocks == 0
    assert state.checkpoints.save_s > 0


async def test_a_complete_answer_leaves_no_copies(copying: EngineRig) -> None:
    rig = copying
    await rig.engine.clear_caches()
    before = rig.engine.snapshot().checkpoints.saved_blocks
    await rig.ask(prompt_of(300, first=92), greedy(30), checkpointed=True)
    await rig.settled()
    state = rig.engine.snapshot()

    assert state.checkpoints.saved_blocks > before
    assert state.host_kv_bytes == 0


async def test_totals_never_decrease_whichever_model_is_active(copying: EngineRig) -> None:
    rig = copying
    await rig.ask(prompt_of(300, first=96), greedy(30), checkpointed=True)
    await rig.settled()
    seen = [rig.engine.snapshot().checkpoints.saved_blocks]
    for model in (OTHER, LLAMA):
        await rig.engine.activate(model)
        seen.append(rig.engine.snapshot().checkpoints.saved_blocks)

    assert seen[0] > 0
    assert seen == sorted(seen)


async def test_cleared_caches_are_empty(rig: EngineRig) -> None:
    prompt = prompt_of(300, first=93)
    progress = (await begin_and_abort(rig, prompt, 8)).progress
    await rig.engine.clear_caches()
    assert rig.engine.snapshot().host_kv_bytes == 0
    after = await rig.ask(prompt, greedy(len(progress)))

    assert after.cached_tokens == 0
    assert progress == after.token_ids


async def test_clearing_caches_keeps_kv_of_running_requests(rig: EngineRig) -> None:
    prompt = prompt_of(300, first=94)
    whole = await rig.ask(prompt, greedy(200))
    other = prompt_of(300, first=95)
    await begin_and_abort(rig, other, 2)
    begun = asyncio.Event()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        request = rig.request(prompt, greedy(200), checkpointed=True)
        run = group.create_task(rig.answer(request, begun))
        await begun.wait()
        await rig.engine.clear_caches()
        other_again = await rig.ask(other, greedy(2))

    assert other_again.cached_tokens == 0
    assert run.result().token_ids == whole.token_ids


async def test_requests_fail_when_the_engine_dies_and_it_restarts(rig: EngineRig) -> None:
    before = await rig.ask(prompt_of(60), greedy(16))
    await begin_and_abort(rig, prompt_of(300, first=97), 8)
    copied = rig.engine.snapshot().checkpoints.saved_blocks
    assert (copied > 0) == copies_kv(rig)
    begun = asyncio.Event()
    processes = rig.engine_processes()
    run = asyncio.ensure_future(rig.answer(rig.request(prompt_of(40), greedy(3000)), begun))
    async with asyncio.timeout(30):
        await begun.wait()
        await rig.kill()
        (died,) = await asyncio.gather(run, return_exceptions=True)

    assert isinstance(died, EngineError)
    assert died.engine_dead
    assert not rig.engine.alive
    assert rig.engine.snapshot().model is None
    await eventually(lambda: not processes & rig.engine_processes(), within_s=5)
    assert rig.engine.snapshot().checkpoints.saved_blocks >= copied
    for refusing in (rig.ask(prompt_of(5), greedy(1)), rig.engine.clear_caches()):
        with pytest.raises(EngineError) as refused:
            await refusing
        assert refused.value.engine_dead
    await rig.bring_up()
    assert before.token_ids == (await rig.ask(prompt_of(60), greedy(16))).token_ids


async def test_a_closed_engine_can_be_closed_again_and_restarted(rig: EngineRig) -> None:
    await rig.engine.close()
    await rig.engine.close()

    assert not rig.engine.alive
    await rig.bring_up()
    assert len((await rig.ask((3, 20), greedy(2))).token_ids) == 2
    # The new engine uses the model that the former one compiled.
    if rig.engine.identity.device.endswith("cpu"):  # on a GPU the files have other places
        assert rig.num_compiled == (rig.compile_cache is not None)
