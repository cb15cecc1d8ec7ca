"""Processes of `ops.bench doors`: simulated servers, doors, and virtual hosts of a broker."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from ops.bench.doors_cells import Cell
from ops.bench.doors_fronts import Choice, Command, Door, Fixed, Servers, Start
from ops.bench.overhead_arms import broker_pid
from ops.broker import PrivateNode
from ops.environment import broker_for
from ops.ports import free_port, free_ports
from services.mesh.spec import EMBEDDED
from shared.contracts.errors import EngineError, SettingsError

START_S = 90.0
STOP_S = 30.0
_POLL_S = 0.2
_LAST_LINES = 20


@dataclass(slots=True)
class BenchProcess:
    """A process in a group of its own, with its output in a file."""

    command: Command
    log: Path
    directory: Path | None = None
    _process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process."""
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self.command.arguments,
                env=os.environ | self.command.environment,
                cwd=self.directory,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def kill(self) -> None:
        """End the process and its group with SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def stop(self) -> None:
        """Terminate the process; kill it if that takes longer than `STOP_S`."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
        await self.kill()

    async def ready(self, url: str) -> None:
        """
        Wait until the process answers at *url* with status 200.

        Raises:
            EngineError: It has ended, or does not answer in `START_S`.
        """
        give_up_at = time.monotonic() + START_S
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < give_up_at:
                if self._process is None or self._process.returncode is not None:
                    break
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    limit = aiohttp.ClientTimeout(total=2.0)
                    async with http.get(url, timeout=limit) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(_POLL_S)
        last = "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        raise EngineError(f"{self.command.arguments[0]} is not ready; its last lines:\n{last}")


@dataclass(slots=True, kw_only=True)
class RunningServer:
    """One server, and its process if the bench may kill it."""

    model: str
    url: str
    process: BenchProcess | None = None


@asynccontextmanager
async def simulated_servers(
    cell: Cell, scale: float, directory: Path
) -> AsyncIterator[list[RunningServer]]:
    """Context with the simulated servers of a cell, with empty caches."""
    async with AsyncExitStack() as stack:
        servers = []
        for number, model in enumerate(cell.models):
            port = free_port()
            command = (
                *(sys.executable, "-m", "ops.bench.doors_server", str(port), "--model", model),
                *("--kind", cell.kind, "--max-running", str(cell.max_running)),
                *("--scale", str(scale)),
            )
            process = BenchProcess(Command(command), directory / f"server-{number}.log")
            await process.start()
            stack.push_async_callback(process.kill)
            url = f"http://127.0.0.1:{port}"
            servers.append(RunningServer(model=model, url=url, process=process))
        for server in servers:
            assert server.process is not None
            await server.process.ready(f"{server.url}/health")
        yield servers


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDoor:
    """A door that is ready for requests."""

    choice: Choice
    pids: Sequence[int] = ()
    """Its processes; their children count also."""
    broker_pid: int | None = None


@asynccontextmanager
async def opened(
    door: Door, servers: Servers, directory: Path, broker: str | None
) -> AsyncIterator[OpenDoor]:
    """
    Context with a running door.

    Args:
        door: The door.
        servers: The servers behind it.
        directory: Folder for logs.
        broker: URL of the broker for a door that needs one, or `embedded`.

    Raises:
        EngineError: Its process does not get ready.
    """
    if door.command is None:
        assert door.choose is not None
        yield OpenDoor(choice=door.choose(servers))
        return
    models = dict.fromkeys(model for model, _ in servers)
    groups: Sequence[Sequence[str]] = [[each] for each in models]
    if not door.is_per_model:
        groups = [list(models)]
    urls: dict[str, str] = {}
    processes = []
    async with AsyncExitStack() as stack:
        for number, group in enumerate(groups):
            folder = Path(tempfile.mkdtemp(prefix="door-", dir=directory))
            port, further_port = free_ports(2)
            behind = [(model, url) for model, url in servers if model in group]
            start = Start(behind, port, further_port, broker, folder)
            process = BenchProcess(
                door.command(start), directory / f"door-{number}.log", directory=folder
            )
            await process.start()
            stack.push_async_callback(process.stop)
            processes.append(process)
            urls |= dict.fromkeys(group, f"http://127.0.0.1:{port}")
        for process, url in zip(processes, dict.fromkeys(urls.values()), strict=True):
            await process.ready(
                f"{url}/health/liveliness" if _is_litellm(door) else f"{url}/health"
            )
        is_shared = broker is not None and broker != EMBEDDED
        yield OpenDoor(
            choice=Fixed(urls),
            pids=[process.pid for process in processes],
            broker_pid=_broker_pid(broker) if is_shared and broker else None,
        )


def _is_litellm(door: Door) -> bool:
    """True for LiteLLM, whose `/health` asks every model for an answer."""
    return door.name.startswith("litellm")


def _broker_pid(url: str) -> int | None:
    with contextlib.suppress(SettingsError):
        return broker_pid(url)
    return None


@dataclass(frozen=True, slots=True)
class Brokers:
    """
    Gives each run a virtual host, so that no request of an earlier run is left in its queues.

    Args:
        given: AMQP URL or `embedded`, which all runs use as it is; None: there is a node.
        node: A private node.
    """

    given: str | None
    node: PrivateNode | None

    @asynccontextmanager
    async def virtual_host(self) -> AsyncIterator[str]:
        """Context with the URL of an empty virtual host, or the given URL."""
        if self.node is None:
            assert self.given is not None
            yield self.given
            return
        name = f"doors-{secrets.token_hex(4)}"
        await asyncio.to_thread(self.node.ctl, "add_vhost", name)
        rights = ("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
        await asyncio.to_thread(self.node.ctl, *rights)
        try:
            yield f"{self.node.url}{name}"
        finally:
            await asyncio.to_thread(self.node.ctl, "delete_vhost", name)


@contextlib.contextmanager
def brokers(requested: str | None) -> Iterator[Brokers]:
    """
    Context in which runs get virtual hosts.

    Args:
        requested: AMQP URL, or `embedded`; None or `private`: a private node.

    Raises:
        SettingsError: The requested broker does not answer, or RabbitMQ is not installed.
    """
    if requested not in (None, "private"):
        with broker_for(requested) as (url, _):
            yield Brokers(url, None)
        return
    with tempfile.TemporaryDirectory(prefix="headway-broker-") as directory:
        node = PrivateNode(Path(directory))
        try:
            node.start()
            yield Brokers(None, node)
        finally:
            node.close()
