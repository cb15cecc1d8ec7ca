"""The start of an agent, and its recorded events."""

import asyncio
from pathlib import Path

import pytest

from services.agent.recording import Begin, records
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.requests import FinishReason
from shared.models.registry import ModelRegistry
from solver.instance.instance import Instance
from tests.agents.rig import AgentRig, open_agent
from tests.agents.scripted_engine import AbleEngine, ScriptedEngine
from tests.queued import OTHER, a_request

pytestmark = pytest.mark.virtual_time


class SlowEngine(AbleEngine):
    """An engine that loads warm models without end."""

    async def warm(self, model: ModelName) -> Seconds:
        await asyncio.Event().wait()
        return await super().warm(model)


async def test_agent_whose_first_model_cannot_be_loaded_ends(
    registry: ModelRegistry, registry_path: Path
):
    engine = ScriptedEngine()
    engine.fail_activate.append(EngineError("the disk is broken"))
    with pytest.raises(EngineError, match=r"tiny-llama.*cannot be loaded: the disk is broken"):
        async with open_agent(registry, registry_path, engine=engine) as rig:
            assert not rig.health.ready


async def test_agent_serves_and_ends_while_it_loads_warm_models(
    registry: ModelRegistry, registry_path: Path
):
    engine = SlowEngine()
    async with open_agent(registry, registry_path, engine=engine, warm_models=(OTHER,)) as rig:
        await rig.running(a_request("r"))
        assert rig.health.reasons == {"warm": f"loading {OTHER}"}


@pytest.fixture
async def recorded(registry: ModelRegistry, registry_path: Path, tmp_path: Path) -> Path:
    """Events of two processes with one request each."""
    path = tmp_path / "events"
    for name in ("one", "two"):
        async with open_agent(registry, registry_path, record=str(path)) as rig:
            await served(rig, name)
    return path


async def served(rig: AgentRig, name: str) -> None:
    await rig.running(a_request(name))
    rig.engine.emit(name, 20, finish=FinishReason.LENGTH)
    await rig.settled()


async def test_replayed_instance_serves_what_the_recorded_one_did(recorded: Path):
    instances: list[Instance] = []
    for now, event in records(recorded):
        if isinstance(event, Begin):
            instances.append(Instance(event.settings, event.models, now))
        else:
            instances[-1].handle(event, now)

    assert [(each.totals.pulled, each.totals.completed) for each in instances] == [(1, 1)] * 2


async def test_record_that_was_not_written_whole_is_left_out(recorded: Path):
    whole = list(records(recorded))
    recorded.write_bytes(recorded.read_bytes()[:-3])

    assert list(records(recorded)) == whole[:-1]


async def test_recording_that_cannot_be_written_is_a_settings_error(
    registry: ModelRegistry, registry_path: Path, tmp_path: Path
):
    with pytest.raises(SettingsError, match="record: cannot write"):
        async with open_agent(registry, registry_path, record=str(tmp_path / "no" / "events")):
            pass
