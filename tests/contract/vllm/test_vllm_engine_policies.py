"""The `qoserve` policy in vLLM's engine core reorders work and changes no answer."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from services.agent.backends.policies import SchedulingSettings
from services.agent.backends.settings import VllmSettings
from services.agent.backends.totals import SchedulingTotals
from services.agent.backends.vllm.front.backend import VllmEngine
from services.agent.backends.vllm.shared.schedulers import POLICY
from services.agent.backends.vllm.shared.schedulers import STOCK as STOCK_CLASS
from services.agent.backends.vllm.shared.workers import CPU_WORKER
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import Tokens
from tests.contract.engine.engines import (
    LLAMA,
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

STOCK = ModelName("stock")
CACHING = ModelName("caching")
COUNTING = ModelName("counting")
POLICIES = [CACHING, ModelName("not-caching"), ModelName("asynchronous")]
PATIENT = Slo(ttft_s=20, tbt_s=1)
ROUNDS = 5
"""Maximum number of attempts: on a busy machine the requests may not overlap."""


def variants(base: ModelEntry) -> tuple[ModelEntry, ...]:
    """One model under several engines; all except the first have memory for 1248 tokens."""

    def variant(name: str, blocks: int = 40, **fields: str | bool) -> ModelEntry:
        limits = {"max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 48}
        return msgspec.structs.replace(
            base,
            name=ModelName(name),
            max_model_len=1024,
            engine_args=limits | {"num_gpu_blocks_override": blocks} | fields,
        )

    return (
        variant(STOCK, 400, scheduler_cls=STOCK_CLASS),
        variant(CACHING),
        variant("not-caching", enable_prefix_caching=False),
        variant(
            "asynchronous",
            async_scheduling=True,
            scheduler_cls=POLICY,
            # Headway's worker has safepoints, which need iterations that end before the next is
            # decided.
            worker_cls="auto",
        ),
        variant(
            COUNTING,
            async_scheduling=True,
            scheduler_cls=POLICY,
            worker_cls=CPU_WORKER,
        ),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineRig]:
    directory = tmp_path_factory.mktemp("models")
    kill = vllm_rig(directory).kill  # without vLLM, the test is skipped or fails
    base = next(each for each in tiny_entries(directory, weights=True) if each.name == LLAMA)
    settings = VllmSettings(
        log_path=str(directory / "vllm.log"),
        warm_bytes=4 << 30,
        scheduling=SchedulingSettings(max_chunk_tokens=64),
    )
    engine = VllmEngine(variants(base), settings)
    await engine.start()
    yield EngineRig(engine, kill)
    await engine.close()


def used_tokens(rig: EngineRig) -> float:
    """Number of KV tokens in use."""
    state = rig.engine.snapshot()
    return state.kv_utilization * state.kv_capacity_tokens


class Load:
    """Requests in progress on one engine, and the order in which they ended."""

    def __init__(self, rig: EngineRig, model: ModelName, group: asyncio.TaskGroup) -> None:
        self._rig = rig
        self._model = model
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []
        self.answers: dict[str, Tokens] = {}
        """Answers by name, in order of completion."""

    def ask(self, name: str, prompt: Tokens, slo: Slo, max_tokens: int = 20) -> None:
        task = self._group.create_task(self._answer(name, prompt, slo, max_tokens))
        self._tasks.append(task)

    async def computed(self, tokens: int) -> None:
        """Wait until *tokens* of KV are in use or all requests have ended (busy machine)."""
        while not all(task.done() for task in self._tasks):
            if used_tokens(self._rig) >= tokens:
                return
            await asyncio.sleep(0.001)

    async def _answer(self, name: str, prompt: Tokens, slo: Slo, max_tokens: int) -> None:
        answer = await self._rig.ask(
            prompt,
            greedy(max_tokens),
            model=self._model,
            slo=slo,
            arrived_at=time.time(),
            # Requests that may lose their KV are checkpointed, so that the KV is restored from the
            # host.
            checkpointed=slo == Slo(),
        )
        self.answers[name] = answer.token_ids


async def mixed_load(rig: EngineRig, model: ModelName) -> tuple[dict[str, Tokens], bool]:
    """
    Serve a chat, long prompts without SLO, a request that is already late, and urgent requests.

    Returns:
        The answers in order of completion; and true if the first long prompt was still running
        when the urgent requests were sent, which a stall of this process can delay.
    """
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        load = Load(rig, model, group)
        load.ask("chat", prompt_of(40, first=300), PATIENT, max_tokens=60)
        load.ask("batch", prompt_of(900, first=1), Slo())
        await load.computed(200)
        load.ask("urgent", prompt_of(150, first=60), PATIENT)
        load.ask("late", prompt_of(300, first=50), Slo(ttft_s=0.001))
        await load.computed(400)
        load.ask("large", prompt_of(600, first=70), PATIENT)
        load.ask("batch again", prompt_of(500, first=2), Slo())
        await asyncio.sleep(0)  # lets the tasks send their requests
        in_time = "batch" not in load.answers
    return load.answers, in_time


def since(before: SchedulingTotals, after: SchedulingTotals) -> SchedulingTotals:
    return SchedulingTotals(
        held=after.held - before.held,
        preempted=after.preempted - before.preempted,
        relegated=after.relegated - before.relegated,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stock_answers(rig: EngineRig) -> dict[str, Tokens]:
    await rig.engine.activate(STOCK)
    return (await mixed_load(rig, STOCK))[0]


@pytest.mark.parametrize(
    ("model", "scheduler"), [(CACHING, "PreemptibleScheduler"), (COUNTING, "AsyncPolicyScheduler")]
)
async def test_the_configuration_of_the_engine_reaches_the_front(
    rig: EngineRig, model: ModelName, scheduler: str
) -> None:
    await rig.bring_up(model)
    assert isinstance(rig.engine, VllmEngine)
    choices = rig.engine.choices

    assert choices is not None
    assert choices.scheduler == scheduler
    assert choices.async_scheduling == (model == COUNTING)
    assert (choices.safepoint_layers == 0) == (model == COUNTING)
    assert (choices.max_running, choices.token_budget) == (48, 256)
    assert rig.engine.snapshot().max_running == 48


async def test_penalties_count_tokens_in_flight(rig: EngineRig) -> None:
    """With asynchronous scheduling the last token is not known when the next one is scheduled."""
    prompts = [prompt_of(40, first=400 + number) for number in range(4)]
    penalised = greedy(40, presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.1)

    async def answers(model: ModelName, progress: list[Tokens]) -> list[Tokens]:
        await rig.engine.activate(model)
        rests = await asyncio.gather(
            *(
                rig.ask(prompt, penalised, model=model, progress=known)
                for prompt, known in zip(prompts, progress, strict=True)
            )
        )
        return [known + rest.token_ids for known, rest in zip(progress, rests, strict=True)]

    expected = await answers(CACHING, [()] * len(prompts))
    assert await answers(COUNTING, [()] * len(prompts)) == expected
    assert await answers(COUNTING, [known[:11] for known in expected]) == expected


@pytest.mark.parametrize("model", POLICIES)
async def test_holding_preempting_and_relegating_change_no_answer(
    rig: EngineRig, stock_answers: dict[str, Tokens], model: ModelName
) -> None:
    await rig.engine.activate(model)
    for _ in range(ROUNDS):
        before = rig.engine.snapshot().scheduling
        answers, in_time = await mixed_load(rig, model)
        await rig.settled()
        totals = since(before, rig.engine.snapshot().scheduling)
        assert stock_answers == answers
        if totals.held and totals.preempted and in_time:
            break

    assert in_time, (
        "in the last round the urgent requests were again sent after the long one had ended"
    )
    assert totals.held > 0
    assert totals.preempted > 0
    assert totals.relegated == 1
    ended = list(answers)
    assert ended.index("urgent") < ended.index("batch")
    assert ended.index("large") < ended.index("batch")


async def test_aborting_held_and_waiting_requests_leaves_no_state(rig: EngineRig) -> None:
    await rig.engine.activate(CACHING)
    held = 0
    for number in range(ROUNDS):
        before = rig.engine.snapshot().scheduling
        await abort_when_held(rig, first=400 + 3 * number)
        await rig.settled()
        held += since(before, rig.engine.snapshot().scheduling).held
        if held:
            break

    assert held > 0
    answer = await rig.ask(prompt_of(40, first=300), greedy(4), model=CACHING)
    assert len(answer.token_ids) == 4


async def abort_when_held(rig: EngineRig, *, first: int) -> None:
    """Send requests; abort all of them once the policy holds one."""
    before = rig.engine.snapshot().scheduling
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        requests = [
            rig.request(prompt, greedy(20), model=CACHING, slo=slo, arrived_at=time.time())
            for prompt, slo in (
                (prompt_of(900, first=first), Slo()),
                (prompt_of(300, first=first + 1), Slo(ttft_s=0.001)),
                (prompt_of(280, first=first + 2), PATIENT),
            )
        ]
        tasks = [group.create_task(rig.answer(requests[0]))]
        while not tasks[0].done() and used_tokens(rig) < 200:
            await asyncio.sleep(0.001)
        tasks += [group.create_task(rig.answer(request)) for request in requests[1:]]
        while not all(task.done() for task in tasks):
            if since(before, rig.engine.snapshot().scheduling).held:
                break
            await asyncio.sleep(0.001)
        for request in requests:
            rig.engine.abort(request.request_id)


async def test_prompt_that_fills_the_memory_is_served(rig: EngineRig) -> None:
    await rig.engine.activate(CACHING)
    async with asyncio.timeout(30):
        answer = await rig.ask(prompt_of(1020, first=9), greedy(4), model=CACHING)

    assert len(answer.token_ids) == 4
