"""The arms of `ops.bench overhead`, a mesh and one process: their HTTP servers and CPU times."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
import psutil

from ops.bench.chat import HOST, Chat, chat
from ops.bench.cores import computed_s
from ops.environment import AMQP_PORT
from ops.ports import free_port
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.consumer import Dispatcher, Handler
from shared.broker.protocol import BindingSpec, Delivery
from shared.contracts.base import Message, ModelName, Seconds
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.telemetry import RequestObserved

BASELINE, MESH = "one process", "mesh"


START_TIMEOUT_S = 60.0

Seen = dict[str, RequestObserved]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A server of chat completions that is measured as an arm of the benchmark."""

    port: int
    model: ModelName
    pids: Mapping[str, int]
    """Process ids by name; the CPU time of a process includes its children."""

    async def chat(self, prompt: str, *, max_tokens: int, ttft_s: Seconds) -> Chat:
        return await chat(self.port, self.model, prompt, max_tokens=max_tokens, ttft_s=ttft_s)

    def cpu_s(self) -> dict[str, Seconds]:
        """User and system time that each process has used so far, with its children."""
        return {name: computed_s(pid) for name, pid in self.pids.items()}


@contextlib.asynccontextmanager
async def arms_of(
    mesh: ProcessMesh, model: str, engine: SimulatedSettings
) -> AsyncIterator[dict[str, Arm]]:
    """
    The two arms, the baseline first; the baseline's process runs while the context is open.

    Raises:
        SettingsError: The broker's process is not visible.
        EngineError: The baseline's process does not start.
    """
    port = free_port()
    command = ("-m", "ops.bench.one_process", str(mesh.spec.registry), str(port))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, msgspec.json.encode(engine).decode()
    )
    try:
        await _listening(port, process)
        pids = {name: each.pid for name, each in mesh.processes.items()}
        pids["rabbitmq"] = broker_pid(mesh.spec.broker)
        name = ModelName(model)
        yield {
            BASELINE: Arm(port=port, model=name, pids={BASELINE: process.pid}),
            MESH: Arm(port=mesh.spec.gateway_port, model=name, pids=pids),
        }
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _listening(port: int, process: asyncio.subprocess.Process) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while process.returncode is None and time.monotonic() < give_up_at:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, port)
            writer.close()
            return
        await asyncio.sleep(0.1)
    raise EngineError("the baseline's process did not start")


def broker_pid(url: str) -> int:
    """
    Id of the process that listens at *url* on this machine.

    Raises:
        SettingsError: No process that listens at *url* is visible.
    """
    port = urlsplit(url).port or AMQP_PORT
    for each in psutil.net_connections("tcp"):
        if not each.laddr or each.laddr.port != port:
            continue
        if each.status == psutil.CONN_LISTEN and each.pid is not None:
            return each.pid
    raise SettingsError(
        f"the process of the broker on port {port} is not visible, and its CPU time is part of the "
        "figures: use --broker private"
    )


@contextlib.asynccontextmanager
async def observed_requests(mesh: ProcessMesh) -> AsyncIterator[Seen]:
    """Telemetry of finished requests by request id, collected while the context is open."""
    seen: Seen = {}
    async with mesh.open_broker("headway-bench-requests") as broker:
        queue = topology.temporary_queue("requests")
        await broker.declare_queue(queue)
        key = topology.OBSERVED_REQUEST_KEY
        await broker.bind(
            BindingSpec(exchange=topology.TELEMETRY, queue=queue.name, routing_key=key)
        )
        handlers: dict[type[Message], Handler[Seen]] = {RequestObserved: _on_request}
        handle = Dispatcher(handlers, seen).handle
        subscription = await broker.consume(queue.name, handle, prefetch=64)
        yield seen
        await subscription.cancel()


async def _on_request(message: RequestObserved, seen: Seen, _delivery: Delivery) -> None:
    seen[message.request_id] = message
