"""Fixtures shared by all tests."""

import asyncio
import functools
import gc
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
import structlog
from hypothesis import HealthCheck, settings

from ops.bench.postgres import PrivatePostgres
from ops.broker import PrivateNode
from ops.sim.virtual_time import VirtualTimeLoop
from tests.brokers import (
    FOUR,
    MEMORY,
    BrokerRig,
    MemoryRig,
    RabbitRig,
    RabbitServer,
    open_server,
    rabbit_targets,
    release_of,
)
from tests.postgres import new_postgres
from tests.stores import migrated_settings

# The time to draw examples depends on the machine's load, not on the code.
for profile, max_examples in (("quick", 25), ("thorough", 100)):
    settings.register_profile(
        profile,
        deadline=None,
        max_examples=max_examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HEADWAY_HYPOTHESIS", "quick"))

RABBIT_PARAMS = [
    pytest.param(target, marks=pytest.mark.rabbitmq, id=f"rabbitmq{n}" if n else "rabbitmq")
    for n, target in enumerate(rabbit_targets())
]
RABBIT_4 = pytest.param(FOUR, marks=(pytest.mark.rabbitmq, pytest.mark.slow), id=FOUR)


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Event loop with virtual time for tests marked `virtual_time`."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}


def pytest_collection_finish() -> None:
    """Exclude objects of imported modules from garbage collection: they live to the end."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """Give all clients of httpx one set of certificates: each would read the system's again."""
    read = functools.cache(httpx.create_ssl_context)
    with pytest.MonkeyPatch.context() as patched:
        # White box: neither httpx nor clients that are made of it have a setting for all.
        patched.setattr("httpx._transports.default.create_ssl_context", read)
        yield


@pytest.fixture(autouse=True)
def default_logging() -> Iterator[None]:
    """Reset logging after each test: programs in this process log to a captured stream."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


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


@pytest.fixture(scope="session")
def postgres() -> Iterator[PrivatePostgres]:
    """A PostgreSQL server; tests take fresh databases, and start it again if they stop it."""
    server = new_postgres()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def migrated_template(postgres: PrivatePostgres, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a database of PostgreSQL with the current schema."""
    name = postgres.fresh()
    asyncio.run(migrated_settings(postgres.url(name), tmp_path_factory.mktemp("template")))
    return name


@pytest.fixture(params=[MEMORY, *RABBIT_PARAMS])
def broker_target(request: Any) -> str:
    """Broker of `broker_rig`; a module may override the fixture with more brokers."""
    return str(request.param)


@pytest.fixture
async def broker_rig(request: Any, broker_target: str) -> AsyncIterator[BrokerRig]:
    """A rig of each broker implementation, in a separate namespace."""
    if broker_target == MEMORY:
        memory = MemoryRig()
        yield memory
        await memory.close()
        return
    server = request.getfixturevalue("rabbit_servers")(broker_target)
    with server.fresh_url() as url:
        rabbit = RabbitRig(url)
        yield rabbit
        await rabbit.close()


@pytest.fixture(params=RABBIT_PARAMS)
def rabbit_target(request: Any) -> str:
    """Server of `rabbit_url`; a module may override the fixture with more servers."""
    return str(request.param)


@pytest.fixture
def rabbit_url(rabbit_target: str, rabbit_servers: Callable[[str], RabbitServer]) -> Iterator[str]:
    """URL of a fresh virtual host on each RabbitMQ."""
    with rabbit_servers(rabbit_target).fresh_url() as url:
        yield url


@pytest.fixture
async def rabbit_rig(rabbit_url: str) -> AsyncIterator[RabbitRig]:
    """A rig of RabbitMQ in a separate virtual host."""
    rig = RabbitRig(rabbit_url)
    yield rig
    await rig.close()


@pytest.fixture
def broker_factory(broker_rig: BrokerRig) -> Any:
    """A `BrokerFactory` for every implementation; all its clients share a namespace."""
    return broker_rig.open


@pytest.fixture(scope="session", params=["rabbitmq", RABBIT_4])
def private_node(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateNode]:
    """
    A node of each release that tests may stop and kill, and whose users they may change; they
    restart it.
    """
    node = PrivateNode(tmp_path_factory.mktemp("private-node"), release=release_of(request.param))
    node.start()
    yield node
    node.close()
