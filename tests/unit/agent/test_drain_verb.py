"""`headway-agent drain`: conditions under which an instance counts as drained."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from services.agent import cli
from services.agent.settings import Settings
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import BindingSpec, Delivery, Settlement
from shared.contracts.base import InstanceId
from shared.contracts.telemetry import InstanceStatus


def says(*, draining: bool = True, running: int = 0) -> InstanceStatus:
    return InstanceStatus(
        instance_id=InstanceId("i1"),
        incarnation="first",
        seq=1,
        at=0.0,
        engine="simulated",
        device="simulated",
        draining=draining,
        running=running,
    )


async def drained(
    monkeypatch: pytest.MonkeyPatch,
    statuses: list[InstanceStatus],
    *,
    exits: bool = False,
    timeout_s: float = 10.0,
) -> int:
    """The exit code if the instance publishes *statuses* and no further status."""
    hub = MemoryHub()

    @asynccontextmanager
    async def connect(client_name: str) -> AsyncIterator[MemoryBroker]:
        async with MemoryBroker(hub, client_name=client_name) as broker:
            yield broker

    async def next_status(_broker: MemoryBroker, instance_id: str) -> InstanceStatus | None:
        assert instance_id == "i1"
        return statuses.pop(0) if statuses else None

    async def heard(delivery: Delivery) -> None:
        await delivery.settle(Settlement.ACK)

    monkeypatch.setattr(cli, "broker_factory", lambda _url: connect)
    monkeypatch.setattr(cli, "next_status", next_status)
    async with MemoryBroker(hub) as agent:
        await topology.declare(agent)
        queue = topology.private_queue("agent.i1")
        await agent.declare_queue(queue)
        key = topology.command_instance("i1")
        binding = BindingSpec(exchange=topology.CONTROL, queue=queue.name, routing_key=key)
        await agent.bind(binding)
        await agent.consume(queue.name, heard, prefetch=1)
        return await cli.drain(
            settings=Settings(instance_id="i1"), exits=exits, timeout_s=timeout_s, json=True
        )


async def test_instance_that_reports_empty_is_drained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    code = await drained(monkeypatch, [says(draining=False), says(running=2), says()])
    printed = capsys.readouterr()

    assert code == 0
    assert msgspec.json.decode(printed.out) == {"instance_id": "i1", "drained": True}
    assert printed.err.splitlines() == ["0 running, 0 waiting", "2 running, 0 waiting"]


async def test_instance_that_stops_reporting_is_not_drained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    code = await drained(monkeypatch, [says(running=2)])
    printed = capsys.readouterr()

    assert code == 1
    assert msgspec.json.decode(printed.out)["drained"] is False
    assert "stopped reporting" in printed.err


async def test_exiting_instance_may_stop_reporting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    code = await drained(monkeypatch, [says(running=2)], exits=True)
    printed = capsys.readouterr()

    assert code == 0
    assert msgspec.json.decode(printed.out)["drained"] is True
    assert "stopped reporting" not in printed.err


async def test_instance_without_a_status_is_not_drained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    code = await drained(monkeypatch, [says()], timeout_s=0.0)

    assert code == 1
    assert "not empty after 0 s" in capsys.readouterr().err
