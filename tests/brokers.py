"""Brokers for tests; each test has its own namespace on a broker."""

import asyncio
import json
import os
import pwd
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import psutil
import pytest
from yarl import URL

from ops.broker import PrivateNode, answers, rabbitmq_binary, run_ctl
from ops.releases import SYSTEM, Release, four
from shared.broker.amqp.broker import AmqpBroker
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import Broker
from shared.contracts.errors import BrokerUnavailableError
from tests.requirements import absent
from tests.tcp_proxy import TcpProxy

DEFAULT_URL = "amqp://guest:guest@127.0.0.1:5672/"
MEMORY = "memory"
FOUR = "rabbitmq-4"
"""Target of a private node with RabbitMQ 4."""
VHOST_BATCH = 8
MADE_BY = re.compile(r"headway-test-(?P<pid>\d+)-[0-9a-f]{8}-\d+$")
"""Names of virtual hosts that a test run created, with the id of its process."""


def rabbit_targets() -> list[str]:
    """URLs of RabbitMQ servers for tests; a private node replaces a default that is down."""
    several = os.environ.get("HEADWAY_TEST_AMQP_URLS", "")
    urls = [url.strip() for url in several.split(",") if url.strip()]
    return urls or [os.environ.get("HEADWAY_AMQP_URL") or DEFAULT_URL]


async def eventually(
    predicate: Callable[[], Awaitable[bool]] | Callable[[], bool], *, within_s: float = 60.0
) -> None:
    """Wait until *predicate* holds; fail after *within_s* of the loop's time."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + within_s
    while True:
        holds = predicate()
        if not isinstance(holds, bool):
            holds = await holds
        if holds:
            return
        if loop.time() > give_up_at:
            raise AssertionError(f"the predicate did not become true within {within_s} s")
        await asyncio.sleep(0.01)


@asynccontextmanager
async def memory_alarm(node: PrivateNode) -> AsyncIterator[None]:
    """Context in which *node* has a memory alarm, so that it reads from no publisher."""

    async def is_set() -> bool:
        alarms = await asyncio.to_thread(node.ctl, "eval", "rabbit_alarm:get_alarms().")
        return alarms.strip() != "[]"

    await asyncio.to_thread(node.ctl, "set_vm_memory_high_watermark", "0")
    try:
        await eventually(is_set)
        yield
    finally:
        await asyncio.to_thread(node.ctl, "set_vm_memory_high_watermark", "0.4")


class RabbitServer:
    """
    A RabbitMQ server and a supply of new virtual hosts on it.

    Each virtual host is deleted soon after its test, because queues use file handles. A broker has
    about 900 file handles and stalls silently when they run out.
    """

    def __init__(self, url: str, node: PrivateNode | None = None) -> None:
        self.base = URL(url)
        self.node = node
        self._prefix = f"headway-test-{os.getpid()}-{uuid4().hex[:8]}"
        self._name: str | None = None
        """Name of the system's node; None until it is known."""
        self._num_made = 0
        self._free: list[str] = []
        self._used: list[str] = []

    @contextmanager
    def fresh_url(self) -> Iterator[str]:
        """URL of an unused virtual host."""
        if not self._free:
            self._free = [f"{self._prefix}-{self._num_made + n}" for n in range(VHOST_BATCH)]
            self._num_made += VHOST_BATCH
            self._replace(self._used, self._free)
            self._used = []
        name = self._free.pop()
        yield str(self.base.with_path(f"/{name}"))
        self._used.append(name)

    def delete_abandoned(self) -> None:
        """Delete virtual hosts left by killed test runs on this machine."""
        listed = self._ctl("eval", "{node(), rabbit_vhost:list_names()}.") or ""
        if (named := re.match(r"\{'?([^',]+)'?,", listed)) is not None:
            self._name = named[1]
        made = [(name, MADE_BY.match(name)) for name in re.findall(r'<<"([^"]+)">>', listed)]
        self._replace([name for name, by in made if by and not psutil.pid_exists(int(by["pid"]))])

    def close(self) -> None:
        if self.node is None:
            self._replace(self._used + self._free)

    def _replace(self, old: list[str], new: Sequence[str] = ()) -> None:
        """Delete virtual hosts and create others, in one call of the node."""
        if not old and not new:
            return
        user = self.base.user or "guest"
        create = (
            'begin rabbit_vhost:add(V, <<"test">>), rabbit_auth_backend_internal:set_permissions('
            f'<<"{user}">>, V, <<".*">>, <<".*">>, <<".*">>, <<"test">>) end'
        )
        # Another test run may have deleted the abandoned hosts.
        delete = 'catch rabbit_vhost:delete(V, <<"test">>)'
        expression = (
            f"[({delete}) || V <- {_binaries(old)}], [({create}) || V <- {_binaries(new)}], ok."
        )
        done = self._name is not None and _calls(self._name, expression)
        if not done and self._ctl("eval", expression) is None:
            self._through_management(old, "DELETE")
            self._through_management(new, "PUT")

    def _ctl(self, *arguments: str) -> str | None:
        """Standard output of `rabbitmqctl` on this server; None if it cannot be used."""
        if self.node is not None:
            return self.node.ctl(*arguments)
        # The wrapper on the path runs as the system node's user, whose cookie is needed.
        ctl = shutil.which("rabbitmqctl")
        local = self.base.host in ("127.0.0.1", "localhost") and self.base.port in (None, 5672)
        if ctl is None or not local:
            return None
        try:
            return run_ctl([ctl, "-q", *arguments])
        except BrokerUnavailableError:
            return None

    def _through_management(self, names: Sequence[str], method: str) -> None:
        user, password = self.base.user or "guest", self.base.password or "guest"
        root = f"http://{self.base.host}:15672/api"
        passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        passwords.add_password(None, root, user, password)
        opener = urllib.request.build_opener(urllib.request.HTTPBasicAuthHandler(passwords))
        grant = json.dumps({"configure": ".*", "write": ".*", "read": ".*"}).encode()
        try:
            for name in names:
                paths = [(f"/vhosts/{name}", b"{}")]
                if method == "PUT":
                    paths.append((f"/permissions/{name}/{user}", grant))
                for path, body in paths:
                    request = urllib.request.Request(
                        root + path,
                        data=body if method == "PUT" else None,
                        method=method,
                        headers={"content-type": "application/json"},
                    )
                    opener.open(request, timeout=10).close()
        except (urllib.error.URLError, OSError) as error:
            pytest.fail(
                f"cannot create virtual hosts on {self.base.host}: neither rabbitmqctl nor the "
                f"management API works ({error})"
            )


def _calls(node: str, expression: str) -> bool:
    """
    Whether `erl_call` could evaluate an expression on the system's node, as the node's user.

    It starts in milliseconds, and `rabbitmqctl` in about a second.
    """
    program = shutil.which("erl_call")
    if program is None or os.geteuid() != 0:
        return False
    try:
        user = pwd.getpwnam("rabbitmq")
    except KeyError:
        return False
    done = subprocess.run(
        [program, "-r", "-sname", node, "-timeout", "60", "-e"],
        input=f"{expression}\n",
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        cwd="/",
        env={"HOME": user.pw_dir, "PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.startswith("{ok,")


def _binaries(names: Sequence[str]) -> str:
    """A list of Erlang's binaries."""
    return "[" + ", ".join(f'<<"{name}">>' for name in names) + "]"


def release_of(target: str) -> Release:
    """The installed RabbitMQ of a private node: the system's, or RabbitMQ 4 for `FOUR`."""
    if target == FOUR:
        release = four()
        if release is None:
            absent("RabbitMQ 4 is not installed; `python -m ops.broker install-4` does it", FOUR)
        return release
    if SYSTEM.program("rabbitmq-server") is None:
        absent("rabbitmq-server is not installed", "rabbitmq-server")
    return SYSTEM


def open_server(target: str, directory: Path) -> RabbitServer:
    """
    The server at *target*; a private node if *target* is `FOUR`, or the default and down.
    """
    if target == FOUR:
        node = PrivateNode(directory, release=release_of(target))
        node.start()
        return RabbitServer(node.url, node)
    url = URL(target)
    if answers(url.host or "127.0.0.1", url.port or 5672):
        server = RabbitServer(target)
        server.delete_abandoned()
        return server
    if target == DEFAULT_URL and rabbitmq_binary("rabbitmq-server") is not None:
        node = PrivateNode(directory)
        node.start()
        return RabbitServer(node.url, node)
    absent(f"no RabbitMQ answers at {url.host}:{url.port}", "rabbitmq")
    raise AssertionError("unreachable")


class BrokerRig(Protocol):
    """New clients in one namespace."""

    async def connect(self, client_name: str = "test") -> Broker:
        """A connected client, which the rig closes at its end."""
        ...

    def open(self, client_name: str) -> "AsyncContextManagerOfBroker":
        """Open a client; this method is a `BrokerFactory`."""
        ...

    async def drop(self, broker: Broker) -> None:
        """Cut *broker*'s connections and wait until the client has reconnected."""
        ...

    async def close(self) -> None: ...


class MemoryRig:
    """Rig of the in-process broker."""

    def __init__(self) -> None:
        self.hub = MemoryHub()
        self._stack = AsyncExitStack()

    async def connect(self, client_name: str = "test") -> Broker:
        return await self._stack.enter_async_context(self.open(client_name))

    def open(self, client_name: str) -> "AsyncContextManagerOfBroker":
        return MemoryBroker(self.hub, client_name=client_name)

    async def drop(self, broker: Broker) -> None:
        assert isinstance(broker, MemoryBroker)
        broker.drop_connection()

    async def close(self) -> None:
        await self._stack.aclose()


class RabbitRig:
    """Rig of RabbitMQ with a proxy for each client."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._stack = AsyncExitStack()
        self._proxies: dict[Broker, TcpProxy] = {}

    async def connect(self, client_name: str = "test") -> Broker:
        return await self._stack.enter_async_context(self.open(client_name))

    @asynccontextmanager
    async def open(self, client_name: str) -> AsyncIterator[Broker]:
        url = URL(self.url)
        async with TcpProxy(url.host or "127.0.0.1", url.port or 5672) as proxy:
            through = str(url.with_host("127.0.0.1").with_port(proxy.port))
            # A busy machine may stall for longer than a client's default timeout.
            async with AmqpBroker(
                through, client_name=client_name, timeout_s=30.0, reconnect_s=0.02
            ) as broker:
                self._proxies[broker] = proxy
                yield broker

    def proxy(self, broker: Broker) -> TcpProxy:
        return self._proxies[broker]

    async def drop(self, broker: Broker) -> None:
        assert isinstance(broker, AmqpBroker)
        # White box: the time without a connection is too short to be observed from outside.
        connections = (broker._publishing, broker._consuming)
        before = [connection._live() for connection in connections]
        self._proxies[broker].drop()
        await eventually(
            lambda: (
                broker.connected
                and not any(
                    connection._live() is old
                    for connection, old in zip(connections, before, strict=True)
                )
            )
        )

    async def close(self) -> None:
        await self._stack.aclose()


class AsyncContextManagerOfBroker(Protocol):
    """Result of a rig's `open`."""

    async def __aenter__(self) -> Broker: ...
    async def __aexit__(self, *exc: object) -> bool | None: ...
