"""Fixtures shared by all tests."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ops.broker import PrivateNode, rabbitmq_binary
from tests.brokers import (
    MEMORY,
    BrokerRig,
    MemoryRig,
    RabbitRig,
    RabbitServer,
    absent,
    open_server,
    rabbit_targets,
)

# How long examples take to draw says how busy the machine is, and nothing of the code.
settings.register_profile("headway", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headway")

RABBIT_PARAMS = [
    pytest.param(target, marks=pytest.mark.rabbitmq, id=f"rabbitmq{n}" if n else "rabbitmq")
    for n, target in enumerate(rabbit_targets())
]


@pytest.fixture(scope="session")
def rabbit_servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], RabbitServer]]:
    servers: dict[str, RabbitServer] = {}

    def server(target: str) -> RabbitServer:
        if target not in servers:
            servers[target] = open_server(target, tmp_path_factory.mktemp("rabbit"))
        return servers[target]

    yield server
    for each in servers.values():
        each.close()
        if each.node is not None:
            each.node.close()


@pytest.fixture(params=[MEMORY, *RABBIT_PARAMS])
async def broker_rig(request: Any) -> AsyncIterator[BrokerRig]:
    """Every broker implementation, in a namespace of its own."""
    if request.param == MEMORY:
        memory = MemoryRig()
        yield memory
        await memory.close()
        return
    server = request.getfixturevalue("rabbit_servers")(request.param)
    with server.fresh_url() as url:
        rabbit = RabbitRig(url)
        yield rabbit
        await rabbit.close()


@pytest.fixture(params=RABBIT_PARAMS)
def rabbit_url(request: Any, rabbit_servers: Callable[[str], RabbitServer]) -> Iterator[str]:
    """URL of a fresh virtual host on each RabbitMQ."""
    with rabbit_servers(request.param).fresh_url() as url:
        yield url


@pytest.fixture
async def rabbit_rig(rabbit_url: str) -> AsyncIterator[RabbitRig]:
    """RabbitMQ only, in a virtual host of its own."""
    rig = RabbitRig(rabbit_url)
    yield rig
    await rig.close()


@pytest.fixture
def broker_factory(broker_rig: BrokerRig) -> Any:
    """A `BrokerFactory` for every implementation; all its clients share a namespace."""
    return broker_rig.open


@pytest.fixture(scope="session")
def private_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateNode]:
    """A running node that tests may stop, kill and fill with users; they leave it running."""
    if rabbitmq_binary("rabbitmq-server") is None:
        absent("rabbitmq-server is not installed", "rabbitmq-server")
    node = PrivateNode(tmp_path_factory.mktemp("private-node"))
    node.start()
    yield node
    node.close()
