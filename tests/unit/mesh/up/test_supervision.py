"""Restarts of services of a running mesh."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from services.mesh.mesh import Ended, Mesh
from services.mesh.spec import AgentSpec, MeshSpec
from services.mesh.supervision import (
    BROKER_DELAY_S,
    MOST_RESTARTS,
    WINDOW_S,
    Restarts,
    Supervisor,
    cause_of,
)
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import Broker, OutMessage
from shared.contracts.base import InstanceId
from shared.contracts.errors import MeshError, SettingsError
from shared.contracts.telemetry import InstanceStatus
from shared.runtime.lifecycle import EXIT_NO_BROKER, EXIT_USAGE
from tests.brokers import eventually

pytestmark = pytest.mark.virtual_time

KILLED = -9
AGENT = "agent-a0"


class FakeMesh(Mesh):
    """A mesh whose services end when a test says so."""

    def __init__(self, tmp_path: Path, hub: MemoryHub) -> None:
        super().__init__(
            MeshSpec(
                broker="embedded",
                registry=tmp_path,
                log_dir=tmp_path,
                gateway_port=1,
                agents=(AgentSpec(instance_id="a0"),),
            )
        )
        self.hub = hub
        self.down: dict[str, Ended] = {}
        self.restarted: list[str] = []
        self.ends_again = False

    def end(self, name: str, code: int | None, last_words: str = "; its log") -> None:
        self.down[name] = Ended(name, code, last_words)

    def ended(self) -> list[Ended]:
        return list(self.down.values())

    async def restart(self, name: str) -> None:
        self.restarted.append(name)
        if not self.ends_again:
            del self.down[name]

    async def start(self) -> None: ...

    async def retry_starts(self) -> None: ...

    async def kill(self, name: str) -> None: ...

    async def stop_services(self, *, serving: bool) -> None: ...

    def open_broker(self, client_name: str) -> AbstractAsyncContextManager[Broker]:
        return MemoryBroker(self.hub, client_name=client_name)


class FailingMesh(FakeMesh):
    """A mesh of which one service ends at once, and whose services take a second to stop."""

    def __init__(self, tmp_path: Path, hub: MemoryHub) -> None:
        super().__init__(tmp_path, hub)
        self.end(AGENT, 1)
        self.stopped: list[bool] = []

    async def stop_services(self, *, serving: bool) -> None:
        await asyncio.sleep(1.0)
        self.stopped.append(serving)


async def test_all_services_stop_although_a_failed_start_is_interrupted(tmp_path: Path):
    mesh = FailingMesh(tmp_path, MemoryHub())

    async def start() -> None:
        async with mesh:
            pass

    starting = asyncio.create_task(start())
    await asyncio.sleep(0.5)
    starting.cancel()
    with pytest.raises(MeshError, match="agent-a0 ended"):
        await starting
    assert mesh.stopped == [True, False]


class Rig:
    def __init__(self, mesh: FakeMesh, broker: Broker) -> None:
        self.mesh, self.broker = mesh, broker
        self.lines: list[str] = []
        self.stop = asyncio.Event()
        self.now = 100.0
        self.running = asyncio.create_task(
            Supervisor(mesh, self.lines.append, lambda: self.now).run(self.stop)
        )

    async def report(self, *, incarnation: str, running: int = 0, waiting: int = 0) -> None:
        status = InstanceStatus(
            instance_id=InstanceId("a0"),
            incarnation=incarnation,
            seq=1,
            at=1.0,
            engine="simulated",
            device="cpu",
            running=running,
            waiting=waiting,
        )
        key = "status.a0"
        await self.broker.publish(topology.TELEMETRY, key, OutMessage.transient(status))
        await asyncio.sleep(1.0)


@pytest.fixture
async def rig(tmp_path: Path):
    hub = MemoryHub()
    async with MemoryBroker(hub, client_name="test") as broker:
        await topology.declare(broker)
        made = Rig(FakeMesh(tmp_path, hub), broker)
        await asyncio.sleep(1.0)
        yield made
        made.stop.set()
        await asyncio.gather(made.running, return_exceptions=True)


async def test_a_killed_agent_is_started_again_and_reported_with_its_requests(rig: Rig):
    await rig.report(incarnation="one", running=6, waiting=1)
    rig.mesh.end(AGENT, KILLED)
    await eventually(lambda: rig.mesh.restarted == [AGENT])
    assert not rig.lines  # until the agent reports
    rig.now += 1.8
    await rig.report(incarnation="two")
    assert rig.lines == [
        "a0 was killed by signal 9 (SIGKILL); back after 1.8 s; its 7 requests continue"
    ]


async def test_a_late_status_of_the_ended_agent_is_not_its_return(rig: Rig):
    await rig.report(incarnation="one", running=1)
    rig.mesh.end(AGENT, KILLED)
    await eventually(lambda: rig.mesh.restarted == [AGENT])
    await rig.report(incarnation="one", running=1)
    assert not rig.lines
    await rig.report(incarnation="two")
    assert rig.lines[0].endswith("; its 1 request continues")


@pytest.mark.parametrize(
    ("code", "said"),
    [(KILLED, "was killed by signal 9 (SIGKILL)"), (1, "ended with code 1")],
)
async def test_another_service_is_reported_at_once(rig: Rig, code: int, said: str):
    rig.mesh.end("gateway", code)
    await eventually(lambda: bool(rig.lines))
    assert rig.lines == [f"gateway {said}; started again"]
    assert rig.mesh.restarted == ["gateway"]


async def test_a_service_in_this_process_is_reported_with_its_error(rig: Rig):
    rig.mesh.end("leader-0", None, ": KeyError('x')")
    await eventually(lambda: bool(rig.lines))
    assert rig.lines == ["leader-0 ended: KeyError('x'); started again"]


async def test_a_service_that_ends_again_and_again_ends_the_mesh(rig: Rig):
    rig.mesh.ends_again = True
    rig.mesh.end("leader-0", 1, "; the end of leader-0.log:\nKeyError")
    with pytest.raises(MeshError, match="more than 5 times in a minute; the end of"):
        await rig.running
    assert rig.mesh.restarted == ["leader-0"] * MOST_RESTARTS


async def test_a_service_that_finds_no_broker_is_started_until_one_answers(rig: Rig):
    await rig.report(incarnation="one", running=1)
    rig.mesh.end(AGENT, KILLED)
    await eventually(lambda: rig.mesh.restarted == [AGENT])
    rig.mesh.ends_again = True
    rig.mesh.end(AGENT, EXIT_NO_BROKER)
    await eventually(lambda: len(rig.mesh.restarted) > 2 * MOST_RESTARTS)
    rig.mesh.ends_again = False
    await asyncio.sleep(BROKER_DELAY_S + 1.0)
    rig.now += 60.0
    await rig.report(incarnation="two")

    assert not rig.running.done()
    assert rig.lines == [
        f"{AGENT} finds no broker; it is started again until one answers",
        "a0 was killed by signal 9 (SIGKILL); back after 60.0 s; its 1 request continues",
    ]


async def test_wrong_settings_are_not_tried_again(rig: Rig):
    rig.mesh.end("gateway", EXIT_USAGE, "; the end of gateway.log:\nport")
    with pytest.raises(SettingsError, match="ended with code 2; the end of"):
        await rig.running
    assert not rig.mesh.restarted


def test_delays_double_and_are_forgotten_after_the_window():
    now = [0.0]
    restarts = Restarts(lambda: now[0])
    assert [restarts.next_delay_s() for _ in range(6)] == [0.0, 0.5, 1.0, 2.0, 4.0, None]
    now[0] = WINDOW_S + 1.0
    assert restarts.next_delay_s() == 0.0


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-15, "was killed by signal 15 (SIGTERM)"),
        (-63, "was killed by signal 63"),
        (0, "ended with code 0"),
        (None, "ended"),
    ],
)
def test_causes(code: int | None, text: str):
    assert cause_of(Ended("x", code, "")) == text
