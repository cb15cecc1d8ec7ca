"""Each fault of a real mesh raises its alert, and no other alert."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ops.broker import PrivateNode
from ops.generate.boards import FOLDER
from ops.prometheus import program
from services.mesh.processes import ProcessMesh
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.producer.producer import Producer
from tests.brokers import eventually, memory_alarm
from tests.e2e.alerts.observed_mesh import (
    FACTOR,
    Watch,
    observed,
    observed_node,
    replaced,
    steady_requests,
    watched,
)
from tests.e2e.meshes import mesh_spec, producer_of, request
from tests.requirements import absent
from tests.unit.ops.dashboards.exported import BROKER
from tests.unit.ops.dashboards.expressions import board_expressions

pytestmark = [pytest.mark.rabbitmq, pytest.mark.slow]

POISON_TOKEN = 333
LATENCY = {"constant_s": 0.008, "linear_s": 4e-5, "context_s": 2e-7}
ENGINE = {"latency": LATENCY, "crash_on_token": POISON_TOKEN}
SLOWDOWN = 4.0
NUM_WAITING = 150
FOLLOWED_S = 5 * 60 / FACTOR
"""Time for which other alerts are awaited after the expected one; most need five minutes."""
MAY_BE_EMPTY = {
    "headway_agent_lsos_total": "no operation was needed",
    "headway_agent_requests_expired_total": "no request has an end",
    "headway_planner_requests_expired_total": "no request has an end",
    "headway_estimator_output_coverage_ratio": "too few answers of the model's own length",
    "headway_estimator_output_residual_tokens": "all answers have a limit",
    "headway_estimator_output_residual_sd_tokens": "all answers have a limit",
}
"""Series that this mesh need not have, with the reason."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[PrivateNode, int]]:
    if program("prometheus") is None:
        absent(
            "prometheus is not installed; `python -m ops.prometheus install` does it", "prometheus"
        )
    with observed_node(tmp_path / "node") as running:
        yield running


@asynccontextmanager
async def only(watch: Watch, alert: str) -> AsyncIterator[None]:
    """Context for a fault that must raise *alert*, and nothing else until other alerts would."""
    begun_at = time.time()
    yield
    await asyncio.sleep(FOLLOWED_S)

    assert await watch.fired_since(begun_at) == {alert}


async def fires(watch: Watch, alert: str) -> dict[str, str]:
    """Wait until *alert* fires; return its labels."""
    begun_at = time.time()

    async def is_firing() -> bool:
        return alert in await watch.firing()

    await eventually(is_firing, within_s=120.0)
    raised = (await watch.firing())[alert]
    print(f"{alert} after {time.time() - begun_at:.1f} s: {raised['annotations']['summary']}")
    assert "no value" not in str(raised["annotations"])
    labels: dict[str, str] = raised["labels"]
    return labels


def slow(settings: dict[str, Any]) -> None:
    # `time_scale` would not do: an engine reports its iterations in simulated seconds.
    engine = settings["engine"]["simulated"]
    engine["latency"] = {term: SLOWDOWN * time_s for term, time_s in LATENCY.items()}


async def test_each_fault_raises_its_alert_and_nothing_else(
    node: tuple[PrivateNode, int], tmp_path: Path
) -> None:
    broker, metrics_port = node
    spec = observed(
        mesh_spec(
            broker.url,
            tmp_path,
            agents=2,
            agent_settings={"engine": {"simulated": ENGINE}},
            # Counts that a killed process falsified are corrected within the short windows.
            planner={"leader": {"audit_period_s": 1.0}},
        )
    )
    async with (
        ProcessMesh(spec) as mesh,
        producer_of(mesh) as producer,
        watched(spec, metrics_port, tmp_path) as watch,
        steady_requests(producer) as finals,
    ):
        calm_since = time.time()
        await asyncio.sleep(FOLLOWED_S)
        assert await watch.fired_since(calm_since) == set()

        async with only(watch, "HeadwayDeadLetters"):
            poison = request(0, prompt=(20, 21, POISON_TOKEN, 22), max_tokens=5)
            failed = await (await producer.submit(poison, reply=ReplyMode.FINAL)).final()
            labels = await fires(watch, "HeadwayDeadLetters")
            # Boards also show the alerts that fire, and the lanes in which requests wait.
            async with waiting_requests(producer):
                await check_queries(watch)
        assert labels["reason"] == "poison_request"
        assert not isinstance(failed, RequestCompleted)
        await watch.until_quiet()

        async with only(watch, "HeadwayInstanceSlow"):
            await replaced(mesh, "agent-a1", slow)
            labels = await fires(watch, "HeadwayInstanceSlow")
        assert labels["instance_id"] == "a1"
        await replaced(mesh, "agent-a1", lambda _settings: None)
        await watch.until_quiet()

        async with only(watch, "HeadwayBrokerMemoryAlarm"), memory_alarm(broker):
            await fires(watch, "HeadwayBrokerMemoryAlarm")
        await watch.until_quiet()

        async with only(watch, "HeadwayNoLeader"):
            await mesh.kill("leader-0")
            await fires(watch, "HeadwayNoLeader")
        await mesh.restart("leader-0")
        await watch.until_quiet()

    print(f"{len(finals)} requests were answered meanwhile")
    assert {type(final) for final in finals} == {RequestCompleted}


@asynccontextmanager
async def waiting_requests(producer: Producer) -> AsyncIterator[None]:
    """Context at whose begin more requests wait than the instances pull; ends with the last one."""
    generations = [
        await producer.submit(
            request(number, prompt=(20, 21, 22), max_tokens=400, slo=Slo()), reply=ReplyMode.FINAL
        )
        for number in range(NUM_WAITING)
    ]
    yield
    finals = [await each.final() for each in generations]
    assert {type(final) for final in finals} == {RequestCompleted}


async def check_queries(watch: Watch) -> None:
    """Assert that every query of the boards has a result, and that RabbitMQ has its series."""
    expressions = [e for path in sorted(FOLDER.glob("*.json")) for e in board_expressions(path)]
    required = [e for e in expressions if not any(name in e for name in MAY_BE_EMPTY)]

    async def have_results() -> bool:
        required[:] = [e for e in required if not await watch.query(e)]
        return not required

    try:
        await eventually(have_results, within_s=60.0)
    except AssertionError as error:
        raise AssertionError(f"queries without a result: {required}") from error
    assert [name for name in BROKER if not await watch.query(name)] == []
    assert len(expressions) > 80
