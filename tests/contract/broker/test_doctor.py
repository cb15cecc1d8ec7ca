"""The doctor names each deviation of a broker, and leaves the broker as it was."""

from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest
from yarl import URL

from ops.broker import PrivateNode
from services.mesh.doctor.doctor import diagnose
from services.mesh.doctor.findings import Finding, Level
from shared.broker import topology
from shared.broker.amqp.broker import AmqpBroker
from shared.runtime.clock import SystemClock
from tests.brokers import memory_alarm

pytestmark = pytest.mark.rabbitmq


@pytest.fixture
def vhost(private_node: PrivateNode) -> Iterator[str]:
    """A virtual host, on which `guest` may do everything."""
    private_node.start()
    name = f"doctor-{uuid4().hex[:8]}"
    private_node.ctl("add_vhost", name)
    private_node.ctl("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
    yield name
    private_node.ctl("delete_vhost", name)


async def found(url: str) -> list[Finding]:
    return [finding async for finding in diagnose(url, SystemClock())]


def deviations(findings: list[Finding]) -> dict[str, str]:
    """Subject -> what deviates; the last one of each subject."""
    return {each.check: each.what for each in findings if each.level is Level.DEVIATION}


async def test_stock_broker_has_no_deviation(rabbit_url: str):
    assert deviations(await found(rabbit_url)) == {}
    async with AmqpBroker(rabbit_url, client_name="test") as broker:
        await topology.declare(broker)
    assert deviations(await found(rabbit_url)) == {}


async def test_differing_and_missing_objects_are_named(rabbit_url: str):
    differing = next(each for each in topology.QUEUES if each.name == topology.LEADER)
    async with AmqpBroker(rabbit_url, client_name="test") as broker:
        await broker.declare_queue(replace(differing, max_length=5))
    whats = [each.what for each in await found(rabbit_url) if each.level is Level.DEVIATION]
    assert any("headway.leader" in what and "x-max-length" in what for what in whats)
    assert any(what.startswith("missing:") and "headway.lanes" in what for what in whats)


@pytest.mark.slow
async def test_broker_stays_as_it_was(private_node: PrivateNode, vhost: str):
    url = f"{private_node.url}{vhost}"
    async with AmqpBroker(url, client_name="test") as broker:
        await topology.declare(broker)
    assert deviations(await found(url)) == {}

    queues = private_node.ctl("list_queues", "-p", vhost, "name", "--silent").split()
    assert set(queues) == {each.name for each in topology.QUEUES}
    assert "headway.doctor" not in private_node.ctl("list_exchanges", "-p", vhost, "--silent")


@pytest.mark.slow
async def test_missing_rights_are_named_with_the_roles_that_need_them(
    private_node: PrivateNode, vhost: str
):
    user = f"weak-{uuid4().hex[:8]}"
    private_node.ctl("add_user", user, "weak")
    private_node.ctl("set_permissions", "-p", vhost, user, "^agent.*", "^agent.*", ".*")
    findings = await found(f"amqp://{user}:weak@127.0.0.1:{private_node.port}/{vhost}")
    missing = {each.what.partition(":")[0]: each.consequence for each in findings}
    private_node.ctl("delete_user", user)

    assert missing["the user may not create a lane"] == "needed by: planner, agent"
    assert missing["the user may not create a reply queue"] == "needed by: gateway, producers"
    assert "the user may not create a private queue" not in missing


@pytest.mark.slow
async def test_missing_right_to_read_cancellations_is_named(private_node: PrivateNode, vhost: str):
    async with AmqpBroker(
        f"amqp://guest:guest@127.0.0.1:{private_node.port}/{vhost}", client_name="test"
    ) as broker:
        await topology.declare(broker)
    user, reads = f"deaf-{uuid4().hex[:8]}", "^(?!headway.cancels$).*"
    private_node.ctl("add_user", user, "deaf")
    private_node.ctl("set_permissions", "-p", vhost, user, ".*", ".*", reads)
    findings = await found(f"amqp://{user}:deaf@127.0.0.1:{private_node.port}/{vhost}")
    missing = {each.what.partition(":")[0]: each.consequence for each in findings}
    private_node.ctl("delete_user", user)

    assert missing["the user may not read cancellations"] == "needed by: agent"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"password": "wrong"}, "refuses the login"),
        ({"path": "/absent"}, "refuses the vhost 'absent'"),
    ],
)
async def test_refused_connection_is_explained(rabbit_url: str, change: dict[str, str], what: str):
    url = URL(rabbit_url)
    for name, value in change.items():
        url = getattr(url, f"with_{name}")(value)
    (finding,) = await found(str(url))
    assert finding.level is Level.DEVIATION
    assert what in finding.what
    assert finding.remedy


async def test_unreachable_broker_is_a_deviation():
    (finding,) = await found("amqp://guest:guest@127.0.0.1:1/")
    assert (finding.check, finding.level) == ("connection", Level.DEVIATION)


@pytest.mark.slow
async def test_policy_that_drops_messages_of_lanes_is_seen(private_node: PrivateNode, vhost: str):
    definition = '{"max-length": 1, "overflow": "drop-head"}'
    private_node.ctl("set_policy", "-p", vhost, "drops", "^relegated", definition)
    assert list(deviations(await found(f"{private_node.url}{vhost}"))) == ["policies"]


@pytest.mark.slow
async def test_memory_alarm_is_seen_in_time(private_node: PrivateNode, vhost: str):
    clock = SystemClock()
    async with memory_alarm(private_node):
        began = clock.now()
        findings = await found(f"{private_node.url}{vhost}")
        took_s = clock.now() - began
    assert list(deviations(findings)) == ["alarms"]
    assert took_s < 5.0
