"""What the demo waits for and warns of before it compares."""

import asyncio

import pytest

from ops.demo.__main__ import only_changes
from ops.demo.arms import ARMS, HEADWAY, MODELS
from ops.demo.conditions import load_warning, missing_parts, spread_warning, wait_for_agents
from services.mesh.spec import AgentSpec
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import OutMessage
from shared.contracts.base import InstanceId, ModelName
from shared.contracts.errors import MeshError
from shared.contracts.telemetry import InstanceStatus, ModelState, Residency
from tests.clocks import NOW

FIRST, SECOND = MODELS
AGENTS = (
    AgentSpec(instance_id="a", settings={"initial_model": FIRST, "warm_models": [SECOND]}),
    AgentSpec(instance_id="b", settings={"initial_model": SECOND, "warm_models": []}),
)


def status(
    name: str, model: str | None, *, second: Residency = Residency.COLD, epoch: int = 1
) -> InstanceStatus:
    return InstanceStatus(
        instance_id=InstanceId(name), incarnation="i", seq=1, at=NOW, engine="e", device="d",
        model=None if model is None else ModelName(model),
        plan_epoch=epoch, models=(ModelState(model=ModelName(SECOND), residency=second),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "missing"),
    [
        ([], [f"a: {FIRST}", f"a: {SECOND}", "a: a plan", f"b: {SECOND}", "b: a plan"]),
        ([status("a", None), status("b", FIRST)], [f"a: {FIRST}", f"a: {SECOND}", f"b: {SECOND}"]),
        ([status("a", FIRST), status("b", SECOND)], [f"a: {SECOND}"]),
        ([status("a", FIRST, second=Residency.WARM), status("b", SECOND, epoch=0)], ["b: a plan"]),
        ([status("a", FIRST, second=Residency.WARM), status("b", SECOND)], []),
    ],
)
def test_models_and_plans_are_missing_until_they_are_reported(
    statuses: list[InstanceStatus], missing: list[str]
):
    assert missing_parts(AGENTS, {each.instance_id: each for each in statuses}) == missing


def test_every_arm_names_what_to_wait_for(tmp_path):
    for arm in ARMS:
        spec = arm.spec(engine="vllm", broker="embedded", registry=tmp_path, log_dir=tmp_path)
        expected = len(spec.agents) * (3 if arm is HEADWAY else 2)
        assert len(missing_parts(spec.agents, {})) == expected


async def test_agents_are_ready_when_the_last_part_is_reported():
    hub = MemoryHub()
    async with MemoryBroker(hub) as far, MemoryBroker(hub) as near:
        await topology.declare(near)
        checked = asyncio.Event()
        waiting = asyncio.create_task(
            wait_for_agents(near, AGENTS[1:], timeout_s=60.0, check=checked.set)
        )
        await checked.wait()
        for model in (None, SECOND):
            assert not waiting.done()
            message = OutMessage.transient(status("b", model))
            await far.publish(topology.TELEMETRY, "status.b", message)
        await waiting


async def test_what_does_not_come_is_named():
    async with MemoryBroker(MemoryHub()) as broker:
        await topology.declare(broker)
        with pytest.raises(
            MeshError, match=f"after 0 s; missing: a: {FIRST}; a: {SECOND}; a: a plan$"
        ):
            await wait_for_agents(broker, AGENTS[:1], timeout_s=0.0, check=lambda: None)


async def test_a_service_that_ended_ends_the_wait():
    def check() -> None:
        raise MeshError("agent-a ended")

    async with MemoryBroker(MemoryHub()) as broker:
        await topology.declare(broker)
        with pytest.raises(MeshError, match="agent-a ended"):
            await wait_for_agents(broker, AGENTS, timeout_s=60.0, check=check)


@pytest.mark.parametrize(
    ("load", "cores", "warns"), [(1.0, 2, False), (1.1, 2, True), (3, 8, False)]
)
def test_other_programs_are_warned_of(load: float, cores: int, *, warns: bool):
    warning = load_warning(load, num_cores=cores)

    assert (warning is not None) is warns
    assert warning is None or f"load average {load:.1f} on {cores} cores" in warning


def test_capacities_that_differ_much_are_warned_of():
    assert spread_warning({"x": 10.0, "y": 15.0}) is None
    assert spread_warning({"x": 10.0}) is None
    assert "x 10.0, y 15.1" in (spread_warning({"x": 10.0, "y": 15.1}) or "")


def test_a_capacity_of_zero_ends_the_demo():
    with pytest.raises(MeshError, match="no token came from y while"):
        spread_warning({"x": 10.0, "y": 0.0})


def test_progress_is_printed_when_it_changes():
    printed: list[str] = []
    say = only_changes(printed.append)
    for line in ("a", "a", "b", "b", "a"):
        say(line)

    assert printed == ["a", "b", "a"]
