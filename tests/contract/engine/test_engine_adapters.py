"""LoRA adapters in every backend: answers, batches, resumption, and changes at run time."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from services.agent.backends.simulated.backend import SimulatedEngine
from services.agent.backends.vllm.front.backend import VllmEngine
from shared.contracts.errors import EngineError
from shared.contracts.models import ADAPTER_HEADROOM, ModelEntry
from shared.contracts.requests import Tokens
from shared.models.tiny import TINY_MODELS
from shared.models.tiny_adapter import TinyAdapter, make_tiny_adapter
from tests.contract.engine.engines import LLAMA, RIGS, EngineRig, greedy, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 24
PROMPT = prompt_of(100)
NAMES = ("one", "two")
NUM_SLOTS = len(NAMES) + ADAPTER_HEADROOM


def adapter_in(directory: Path, name: str, seed: int) -> str:
    adapter = TinyAdapter(base=TINY_MODELS[LLAMA], seed=seed)
    return str(make_tiny_adapter(directory / name, adapter))


def changed(rig: EngineRig, **fields: Any) -> ModelEntry:
    """The entry of the model with *fields*; the engine gets it."""
    (entry,) = (each for each in rig.entries if each.name == LLAMA)
    entry = msgspec.structs.replace(entry, **fields)
    rig.entries = tuple(entry if each.name == LLAMA else each for each in rig.entries)
    rig.engine.replace(entry)
    return entry


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["simulated", pytest.param("vllm-policy", marks=[pytest.mark.vllm, pytest.mark.slow])],
)
async def rig(request: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineRig]:
    """An engine with two adapters of its active model."""
    directory = tmp_path_factory.mktemp("models")
    rig = RIGS[request.param](directory)
    changed(
        rig, adapters={name: adapter_in(directory, name, seed) for seed, name in enumerate(NAMES)}
    )
    await rig.bring_up()
    yield rig
    await rig.engine.close()


async def answer(rig: EngineRig, adapter: str | None, **fields: Any) -> Tokens:
    return (await rig.ask(PROMPT, greedy(NUM_TOKENS), adapter=adapter, **fields)).token_ids


async def test_each_adapter_changes_the_answer(rig: EngineRig) -> None:
    answers = {await answer(rig, name) for name in (None, *NAMES)}

    assert len(answers) == 3


async def test_answers_of_a_mixed_batch_equal_those_of_single_requests(rig: EngineRig) -> None:
    """KV is not shared between adapters, and requests without an adapter get none."""
    names = [None, *NAMES] * 4
    alone = {name: await answer(rig, name) for name in (None, *NAMES)}
    mixed = await asyncio.gather(*(answer(rig, name) for name in names))

    assert mixed == [alone[name] for name in names]


@pytest.mark.parametrize("cut", [1, 13])
async def test_a_resumed_answer_equals_the_undisturbed_one(rig: EngineRig, cut: int) -> None:
    whole = await answer(rig, "one")
    rest = await answer(rig, "one", progress=whole[:cut])

    assert whole[:cut] + rest == whole


async def test_an_unknown_adapter_is_refused(rig: EngineRig) -> None:
    with pytest.raises(EngineError, match="has no adapter 'unknown'"):
        await answer(rig, "unknown")


async def test_adapters_change_while_the_engine_runs(rig: EngineRig, tmp_path: Path) -> None:
    before = {name: await answer(rig, name) for name in (None, *NAMES)}
    (entry,) = (each for each in rig.entries if each.name == LLAMA)
    running = asyncio.ensure_future(
        rig.ask(PROMPT, greedy(300), adapter="two", request_id="running")
    )
    changed(rig, adapters={"one": entry.adapters["one"], "new": adapter_in(tmp_path, "new", 9)})
    new = await answer(rig, "new")

    assert new not in before.values()
    assert len((await running).token_ids) == 300
    assert await answer(rig, "two") == before["two"], "a queued request for a removed adapter"
    assert await answer(rig, "one") == before["one"]
    changed(rig, adapters=entry.adapters)


async def test_a_directory_with_other_files_is_another_adapter(
    rig: EngineRig, tmp_path: Path
) -> None:
    if isinstance(rig.engine, SimulatedEngine):
        pytest.skip("simulated engines read no adapters")
    (entry,) = (each for each in rig.entries if each.name == LLAMA)
    changed(rig, adapters=entry.adapters | {"new": adapter_in(tmp_path, "new", 20)})
    first = await answer(rig, "new")
    adapter_in(tmp_path, "new", 21)

    assert await answer(rig, "new") != first
    adapter_in(tmp_path, "new", 20)
    assert await answer(rig, "new") == first
    changed(rig, adapters=entry.adapters)


async def test_an_adapter_that_cannot_be_loaded_ends_its_own_request_only(
    rig: EngineRig, tmp_path: Path
) -> None:
    if not isinstance(rig.engine, VllmEngine):
        pytest.skip("simulated engines read no adapters")
    (entry,) = (each for each in rig.entries if each.name == LLAMA)
    broken = Path(adapter_in(tmp_path, "broken", 3))
    (broken / "adapter_model.safetensors").write_bytes(b"no weights")
    changed(rig, adapters=entry.adapters | {"broken": str(broken), "gone": str(tmp_path / "gone")})
    expected = await answer(rig, None)
    others = [asyncio.ensure_future(answer(rig, name)) for name in (None, "one")]
    for name in ("broken", "gone"):
        with pytest.raises(EngineError, match="cannot be loaded"):
            await answer(rig, name)

    assert (await asyncio.gather(*others))[0] == expected
    assert rig.engine.alive
    shutil.rmtree(broken)
    changed(rig, adapters=entry.adapters)


async def test_more_adapters_than_slots_are_loaded_in_turn(rig: EngineRig, tmp_path: Path) -> None:
    """Idle adapters make room, and requests without an adapter get none if all slots are used."""
    (entry,) = (each for each in rig.entries if each.name == LLAMA)
    many = {f"a{number}": adapter_in(tmp_path, f"a{number}", 30 + number) for number in range(9)}
    changed(rig, adapters=entry.adapters | many)
    answers = {name: await answer(rig, name) for name in many}

    assert len(set(answers.values())) == len(many)
    base = await answer(rig, None)
    names = list(many)[:NUM_SLOTS]
    mixed = await asyncio.gather(*(answer(rig, name) for name in (None, *names, None)))
    assert mixed == [base, *(answers[name] for name in names), base]
    changed(rig, adapters=entry.adapters)


async def test_adapters_outlive_a_crash_of_the_engine(rig: EngineRig) -> None:
    expected = await answer(rig, "one")
    await rig.kill()
    await asyncio.sleep(0)
    while rig.engine.snapshot().model is not None:
        await asyncio.sleep(0.05)
    await rig.bring_up()

    assert await answer(rig, "one") == expected
