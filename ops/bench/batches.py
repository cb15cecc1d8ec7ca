"""
Benchmark of batches: kills under interactive load, throughput, windows, and expected ends.

- Every line of a batch is in one of its files, once, while gateways are killed and the broker
  restarts; the memory of the gateway hardly grows.
- A batch alone is nearly as fast as direct publishing over AMQP.
- Batches with short windows end in time under changing load, while best effort waits.
- The expected end is close to the end when a quarter, a half and three quarters have ended.
"""

import asyncio
import contextlib
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from ops.bench.meshes import MODEL, simulated_agent
from ops.bench.result import Line, Result
from ops.broker import PrivateNode, rabbitmq_binary
from ops.ports import free_port
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from services.mesh.spec import MeshSpec
from shared.contracts.errors import CapacityError, SettingsError, TransientError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from shared.store.location import location_of
from shared.store.migrating import migrate
from shared.store.settings import StoreSettings

ENDPOINT = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
NUM_KILLS = 3
LEASE_S = 3.0
MOST_GROWTH_MIB = 150.0
LEAST_SHARE = 0.8
"""Least throughput of a batch, as a part of that of direct publishing."""
MOST_ERRORS = {0.25: 0.20, 0.5: 0.15, 0.75: 0.10}
"""Part of a batch that has ended -> bound of the median error of its expected end."""
GIVE_UP_S = 1800.0
DIRECT_IN_PROGRESS = 512
WINDOWS_S = (60, 120, 240)


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark on a private RabbitMQ node, which it restarts."""
    del broker  # another broker could not be restarted
    if rabbitmq_binary("rabbitmq-server") is None:
        raise SettingsError("this benchmark restarts its broker: install rabbitmq-server")
    result = Result(name="batches", seed=seed, quick=quick)
    random = np.random.default_rng(seed)
    async with _mesh(SimulatedSettings(time_scale=0.2)) as rig:
        await _throughput(rig, result, num_lines=400 if quick else 4000)
        await _kills(rig, result, random, num_lines=600 if quick else 10_000)
    async with _mesh(SimulatedSettings(max_running=16)) as rig:
        await _windows(rig, result, random, num_batches=4 if quick else 20, quick=quick)
    return result


@dataclass(slots=True)
class _Rig:
    node: PrivateNode
    mesh: ProcessMesh
    http: httpx.AsyncClient


@contextlib.asynccontextmanager
async def _mesh(engine: SimulatedSettings) -> AsyncIterator[_Rig]:
    """Two instances with one of each other service, on one store and a private broker."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        node = PrivateNode(root / "node")
        node.start()
        try:
            settings = StoreSettings(data_dir=str(root / "data"))
            if (location := location_of(settings)) is not None:
                await migrate(location, timeout_s=60.0)
            store: dict[str, Any] = msgspec.to_builtins(settings)
            batches = {"lease_s": LEASE_S, "max_running": 32}
            spec = MeshSpec(
                broker=node.url,
                registry=make_tiny_models(root / "models", weights=False),
                log_dir=root / "log",
                gateway_port=free_port(),
                gateway={"front": "light", "store": store, "batches": batches},
                planner={"store": store},
                log_level="warning",
                agents=tuple(simulated_agent(f"a{n}", engine) for n in range(2)),
            )
            async with (
                ProcessMesh(spec) as mesh,
                httpx.AsyncClient(base_url=spec.gateway_url, timeout=60.0) as http,
            ):
                yield _Rig(node, mesh, http)
        finally:
            node.close()


def _body(number: int, max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": f"what does line {number} say about this",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _input(num_lines: int, max_tokens: int) -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": ENDPOINT,
                "body": _body(number, max_tokens),
            }
        ).encode()
        + b"\n"
        for number in range(num_lines)
    )


async def _create(rig: _Rig, content: bytes, window: str) -> str:
    file = await rig.http.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)}
    )
    file.raise_for_status()
    asked = {
        "input_file_id": file.json()["id"],
        "endpoint": ENDPOINT,
        "completion_window": window,
    }
    batch = await rig.http.post("/v1/batches", json=asked)
    batch.raise_for_status()
    return str(batch.json()["id"])


async def _polled(rig: _Rig, batch_id: str) -> AsyncIterator[dict[str, Any]]:
    """The batch, several times a second until it has ended; nothing while no gateway answers."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = await rig.http.get(f"/v1/batches/{batch_id}")
            if answer.status_code == httpx.codes.OK:
                batch = answer.json()
                yield batch
                if batch["status"] in ENDED:
                    return
        await asyncio.sleep(0.25)


async def _ended(rig: _Rig, batch_id: str) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    async with asyncio.timeout(GIVE_UP_S):
        async for batch in _polled(rig, batch_id):  # noqa: B007 - the last one counts
            pass
    return batch


async def _custom_ids(rig: _Rig, file_id: str | None) -> list[str]:
    if file_id is None:
        return []
    content = await rig.http.get(f"/v1/files/{file_id}/content")
    return [json.loads(line)["custom_id"] for line in content.text.splitlines()]


async def _throughput(rig: _Rig, result: Result, *, num_lines: int) -> None:
    """Compare a batch with direct publishing of the same requests, both without other load."""
    max_tokens = 8
    async with _producer(rig) as producer:
        limit = asyncio.Semaphore(DIRECT_IN_PROGRESS)

        async def one(number: int) -> None:
            async with limit:
                body = _body(number, max_tokens)
                request = InferenceRequest(**body, slo=Slo(ttlt_s=3600.0))
                await (await producer.submit(request, reply=ReplyMode.FINAL)).final()

        begun = time.monotonic()
        await asyncio.gather(*map(one, range(num_lines)))
        direct = num_lines / (time.monotonic() - begun)
    begun = time.monotonic()
    await _ended(rig, await _create(rig, _input(num_lines, max_tokens), "24h"))
    batch = num_lines / (time.monotonic() - begun)
    result.figures |= {"direct, lines per s": direct, "batch, lines per s": batch}
    result.lines.append(
        Line(
            name="direct publishing, as a multiple of a batch",
            value=direct / batch,
            bound=1 / LEAST_SHARE,
        )
    )


async def _kills(rig: _Rig, result: Result, random: np.random.Generator, *, num_lines: int) -> None:
    """Kill the gateway, restart the broker, and look for each line in the results."""
    content = _input(num_lines, 16)
    steps = [num_lines * (number + 1) // (NUM_KILLS + 2) for number in range(NUM_KILLS + 1)]
    growth = 0.0
    async with _loaded(rig, _interactive(random, rate_rps=5.0)):
        batch_id = await _create(rig, content, "24h")
        base = _memory_mib(rig)
        batch: dict[str, Any] = {}
        async with asyncio.timeout(GIVE_UP_S):
            async for batch in _polled(rig, batch_id):
                growth = max(growth, _memory_mib(rig) - base)
                if not steps or batch["request_counts"]["completed"] < steps[0]:
                    continue
                steps.pop(0)
                if steps:
                    await _kill_gateway(rig)
                    base = _memory_mib(rig)
                else:
                    await asyncio.to_thread(rig.node.stop)
                    await asyncio.to_thread(rig.node.start)
    output = await _custom_ids(rig, batch["output_file_id"])
    errors = await _custom_ids(rig, batch["error_file_id"])
    times = Counter(output + errors)
    wrong = sum(times[f"c{number}"] != 1 for number in range(num_lines))
    result.figures |= {
        "lines, with three kills and a restart": num_lines,
        "status": batch["status"],
        "lines of the error file": len(errors),
        "growth of the gateway, MiB": growth,
    }
    result.lines += [
        Line(name="lines that are not in the results once", value=float(wrong), bound=0.0),
        Line(name="lines that failed", value=float(len(errors)), bound=0.0),
        Line(name="growth of the gateway, MiB", value=growth, bound=MOST_GROWTH_MIB),
    ]


async def _windows(
    rig: _Rig, result: Result, random: np.random.Generator, *, num_batches: int, quick: bool
) -> None:
    """Run batches one after the other with windows of different length, under changing load."""
    late, errors = 0, _Errors()
    async with _loaded(rig, _changing(random), _best_effort()):
        for number in range(num_batches):
            window_s = 20 if quick else WINDOWS_S[number % len(WINDOWS_S)]
            num_lines = int(window_s * random.uniform(4.0, 8.0))
            batch_id = await _create(rig, _input(num_lines, 32), f"{window_s}s")
            seen = [each | {"seen_at": time.time()} async for each in _polled(rig, batch_id)]
            late += seen[-1]["status"] != "completed"
            errors.add(seen)
    result.figures |= {"batches with short windows": num_batches} | {
        f"median error of the expected end at {share:.0%}": errors.median(share)
        for share in MOST_ERRORS
    }
    result.lines.append(Line(name="batches that were late", value=float(late), bound=0.0))
    result.lines += [
        Line(
            name=f"median error of the expected end at {share:.0%}",
            value=None if quick else errors.median(share),
            bound=bound,
        )
        for share, bound in MOST_ERRORS.items()
    ]


@dataclass(slots=True)
class _Errors:
    """Errors of expected ends, as parts of the time that was left."""

    by_share: dict[float, list[float]] = field(
        default_factory=lambda: {share: [] for share in MOST_ERRORS}
    )

    def add(self, seen: list[dict[str, Any]]) -> None:
        """Add the errors of a batch that was *seen* several times until its end."""
        end_at = seen[-1]["seen_at"]
        for share, errors in self.by_share.items():
            for batch in seen[:-1]:
                counts, expected_at = batch["request_counts"], batch["headway"]["expected_at"]
                ended = counts["completed"] + counts["failed"]
                if counts["total"] and ended >= share * counts["total"]:
                    if expected_at is not None and end_at > batch["seen_at"]:
                        left_s = end_at - batch["seen_at"]
                        errors.append(abs(expected_at - end_at) / left_s)
                    break

    def median(self, share: float) -> float | None:
        errors = self.by_share[share]
        return float(np.median(errors)) if errors else None


Load = Callable[[Producer], AsyncIterator[None]]
"""Publishes requests until it is closed; yields after each."""


@contextlib.asynccontextmanager
async def _loaded(rig: _Rig, *loads: Load) -> AsyncIterator[None]:
    """Context with other load; its answers are not waited for."""
    async with _producer(rig) as producer:
        tasks = [asyncio.create_task(_drive(load(producer))) for load in loads]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _drive(load: AsyncIterator[None]) -> None:
    async for _ in load:
        pass


async def _ask(producer: Producer, **fields: Any) -> None:
    request = InferenceRequest(**(_body(0, 32) | fields))
    with contextlib.suppress(CapacityError, TransientError):  # while the broker restarts
        await producer.submit(request, reply=ReplyMode.FINAL)


def _interactive(random: np.random.Generator, *, rate_rps: float) -> Load:
    async def load(producer: Producer) -> AsyncIterator[None]:
        while True:
            await _ask(producer, slo=Slo(ttft_s=2.0, tbt_s=0.2))
            await asyncio.sleep(random.exponential(1 / rate_rps))
            yield

    return load


def _changing(random: np.random.Generator) -> Load:
    """Phases of 5 to 20 s with little or much interactive load."""

    async def load(producer: Producer) -> AsyncIterator[None]:
        while True:
            rate_rps = float(random.choice([2.0, 15.0]))
            until = time.monotonic() + random.uniform(5.0, 20.0)
            while time.monotonic() < until:
                await _ask(producer, slo=Slo(ttft_s=2.0, tbt_s=0.2))
                await asyncio.sleep(random.exponential(1 / rate_rps))
                yield

    return load


def _best_effort() -> Load:
    """More best effort than engines run at once."""

    async def load(producer: Producer) -> AsyncIterator[None]:
        while True:
            if producer.num_outstanding < 200:
                await _ask(producer, slo=Slo(), max_tokens=64)
            else:
                await asyncio.sleep(0.1)
            yield

    return load


@contextlib.asynccontextmanager
async def _producer(rig: _Rig) -> AsyncIterator[Producer]:
    async with (
        rig.mesh.open_broker("headway-bench") as broker,
        Producer(
            broker, name="bench", clock=SystemClock(), user_id="guest", give_up_after_s=60.0
        ) as producer,
    ):
        yield producer


async def _kill_gateway(rig: _Rig) -> None:
    gateway = rig.mesh.processes["gateway"]
    gateway.signal(signal.SIGKILL)
    await gateway.wait(10.0)
    await gateway.start()
    async with asyncio.timeout(60.0):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await rig.http.get("/ready")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(0.1)


def _memory_mib(rig: _Rig) -> float:
    """Resident memory of the gateway; 0 while it is not running."""
    try:
        status = Path(f"/proc/{rig.mesh.processes['gateway'].pid}/status").read_text()
    except OSError:
        return 0.0
    lines = (line.split() for line in status.splitlines())
    return next((int(each[1]) / 1024 for each in lines if each[0] == "VmRSS:"), 0.0)
