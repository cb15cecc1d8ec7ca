"""A model in vLLM gives the same answers after every path of activation."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from ops.engine_runs import generate
from services.agent.backends.vllm.front.device_defaults import CPU_KV_CACHE_BYTES
from shared.contracts.base import ModelName
from shared.contracts.errors import EngineError
from shared.contracts.requests import Tokens
from shared.contracts.telemetry import ActivationPath, ModelState, Residency
from tests.contract.engine.engines import LLAMA, EngineRig, greedy, prompt_of, vllm_rig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]

TWIN, QWEN = ModelName("tiny-llama-b"), ModelName("tiny-qwen")
"""TWIN has LLAMA's shape; QWEN has another shape."""
GIB = 1 << 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineRig]:
    """Engines with host memory for one parked engine beside the active engine."""
    made = vllm_rig(tmp_path_factory.mktemp("models"), policy="qoserve", warm_bytes=GIB)
    await made.bring_up(LLAMA)
    yield made
    await made.engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(rig: EngineRig) -> dict[ModelName, Tokens]:
    """Each model's answers in a new engine."""
    answers: dict[ModelName, Tokens] = {}
    for model in (TWIN, QWEN, LLAMA):
        for each in (LLAMA, TWIN, QWEN):
            if state(rig, each).residency is Residency.WARM:
                await rig.engine.cool(each)
        await rig.engine.activate(model)
        answers[model] = await answer(rig, model)
    assert len(set(answers.values())) == 3
    return answers


def state(rig: EngineRig, model: ModelName) -> ModelState:
    return next(each for each in rig.engine.snapshot().models if each.model == model)


async def answer(rig: EngineRig, model: ModelName) -> Tokens:
    return (await rig.ask(prompt_of(200), greedy(24), model=model)).token_ids


async def alone(rig: EngineRig, model: ModelName) -> None:
    """Activate *model* and cool all other models."""
    await rig.bring_up(model)
    for each in (LLAMA, TWIN, QWEN):
        if each != model:
            await rig.engine.cool(each)


async def there_and_back(
    rig: EngineRig, undisturbed: dict[ModelName, Tokens], other: ModelName
) -> list[ActivationPath | None]:
    """Activate *other* and then LLAMA; check the two answers and return the activation paths."""
    assert await answer(rig, LLAMA) == undisturbed[LLAMA]
    paths = []
    for model in (other, LLAMA):
        paths.append(state(rig, model).path)
        await rig.engine.activate(model)
        assert await answer(rig, model) == undisturbed[model]
    return paths


async def test_model_with_a_parked_engine_is_activated(
    rig: EngineRig, undisturbed: dict[ModelName, Tokens]
) -> None:
    await alone(rig, LLAMA)
    await rig.engine.warm(QWEN)
    assert state(rig, QWEN).residency is Residency.WARM
    paths = await there_and_back(rig, undisturbed, QWEN)
    assert paths == [ActivationPath.PARKED, ActivationPath.PARKED]


async def test_model_is_activated_by_a_reload_of_weights(
    rig: EngineRig, undisturbed: dict[ModelName, Tokens]
) -> None:
    await alone(rig, LLAMA)
    paths = await there_and_back(rig, undisturbed, TWIN)
    assert paths == [ActivationPath.RELOAD, ActivationPath.RELOAD]


async def test_model_is_activated_in_a_new_engine(
    rig: EngineRig, undisturbed: dict[ModelName, Tokens]
) -> None:
    await alone(rig, LLAMA)
    paths = await there_and_back(rig, undisturbed, QWEN)
    assert paths == [ActivationPath.COLD, ActivationPath.PARKED]


async def test_warm_weights_are_also_reloaded(
    rig: EngineRig, undisturbed: dict[ModelName, Tokens]
) -> None:
    await alone(rig, LLAMA)
    await rig.engine.warm(TWIN)
    assert state(rig, TWIN).residency is Residency.WARM
    paths = await there_and_back(rig, undisturbed, TWIN)
    assert paths == [ActivationPath.RELOAD, ActivationPath.RELOAD]


async def test_an_engine_is_warmed_beside_an_active_one(
    rig: EngineRig, undisturbed: dict[ModelName, Tokens]
) -> None:
    await alone(rig, LLAMA)
    tokens: list[int] = []
    during = 0

    async def read() -> None:
        request = rig.request(prompt_of(200), greedy(2000))
        async for output in generate(rig.engine, request):
            tokens.extend(output.token_ids)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        reader = group.create_task(read())
        while not tokens:
            await asyncio.sleep(0.01)
        before = len(tokens)
        await rig.engine.warm(QWEN)
        during = len(tokens) - before
        reader.cancel()
    assert during > 20
    assert tuple(tokens[:24]) == undisturbed[LLAMA]
    await rig.engine.activate(QWEN)
    assert await answer(rig, QWEN) == undisturbed[QWEN]


async def test_host_memory_of_an_engine_is_measured(rig: EngineRig, tmp_path: Path) -> None:
    """The measured size exceeds KV plus the budget of KV copies, and replaces the estimate."""
    await alone(rig, LLAMA)
    supposed = state(vllm_rig(tmp_path), LLAMA).warm_bytes

    assert state(rig, LLAMA).warm_bytes not in (0, supposed)
    assert state(rig, LLAMA).warm_bytes > CPU_KV_CACHE_BYTES + (256 << 20)


async def test_the_active_model_cannot_be_cooled(rig: EngineRig) -> None:
    await rig.bring_up(LLAMA)
    with pytest.raises(EngineError, match="active"):
        await rig.engine.cool(LLAMA)


async def test_a_failing_donor_loses_its_model(tmp_path: Path) -> None:
    made = vllm_rig(tmp_path, warm_bytes=0)
    weights = tmp_path / TWIN / "model.safetensors"
    whole = weights.read_bytes()
    try:
        await made.bring_up(LLAMA)
        before = await answer(made, LLAMA)
        weights.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(EngineError, match="cannot load tiny-llama-b"):
            await made.engine.activate(TWIN)
        assert state(made, LLAMA).residency is Residency.COLD
        assert made.engine.alive
        await made.engine.activate(LLAMA)
        assert await answer(made, LLAMA) == before
    finally:
        await made.engine.close()
