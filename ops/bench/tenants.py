"""
Benchmark of tenants' limits and of what they claim.

A tenant sends four times its limit of requests per minute through two gateways, one of which is
killed and started again, and over AMQP, to three groupers. A batch tenant claims tight targets
and sends the same requests without claims, while another tenant measures its first tokens.
"""

import asyncio
import contextlib
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ops.bench.meshes import MODEL, bench_producer, simulated_agent
from ops.bench.result import Line, Result
from ops.environment import broker_for
from ops.ports import free_port
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import MeshProcess, ProcessMesh
from services.mesh.spec import EMBEDDED, MeshSpec
from shared.contracts.errors import SettingsError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from shared.runtime.tasks import poll_until

LIMIT = 660
"""Requests per minute of the tenant, so that 600 a minute show that the limit is used."""
LEAST = 600
TIMES = 4
WINDOW_S = 60.0
LIMITED, BATCH, PROBING = "limited", "batch", "probing"
POLICIES: dict[str, Any] = {
    "tenants": {
        LIMITED: {"requests_per_minute": LIMIT},
        BATCH: {
            "classes": ["non_interactive", "best_effort"],
            "high_importance": False,
            "max_priority": 0,
        },
    }
}
GREEDY = 1000
GREEDY_RPS = 25.0
"""Requests of the batch tenant in one arm."""
PROBE_RPS = 12.0
PAIRS = 5
RATIO_P95 = 1.10
START_S = 30.0


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark; a quick run is too short for the least number in a sliding minute."""
    del seed  # arrivals are regular
    result = Result(name="tenants", seed=0, quick=quick)
    async with _mesh(broker) as rig:
        await _limits(rig, result, seconds=18.0 if quick else 200.0)
        await _claims(rig, result, pairs=2 if quick else PAIRS, greedy=125 if quick else GREEDY)
    return result


@dataclass(slots=True)
class _Rig:
    mesh: ProcessMesh
    second: MeshProcess
    """Gateway beside that of the mesh; it is killed."""
    urls: tuple[str, str]


@contextlib.asynccontextmanager
async def _mesh(broker: str | None) -> AsyncIterator[_Rig]:
    """Three groupers, two gateways and two instances."""
    with broker_for(broker) as (url, line), tempfile.TemporaryDirectory() as directory:
        if url == EMBEDDED:
            raise SettingsError(f"this benchmark needs RabbitMQ; {line}")
        root = Path(directory)
        policies = root / "tenants.json"
        policies.write_text(json.dumps(POLICIES))
        spec = MeshSpec(
            broker=url,
            registry=make_tiny_models(root / "models", weights=False),
            log_dir=root / "log",
            gateway_port=free_port(),
            gateway={"api_keys": {name: name for name in (LIMITED, BATCH)}},
            log_level="warning",
            agents=tuple(simulated_agent(f"a{n}", SimulatedSettings()) for n in range(2)),
            groupers=3,
            tenants=policies,
        )
        async with ProcessMesh(spec) as mesh:
            _, settings = spec.service_settings()["gateway"]
            port = free_port()
            second = MeshProcess(
                "gateway-2", service="gateway", settings=settings | {"port": port}, directory=root
            )
            await second.start()
            try:
                yield _Rig(mesh, second, (spec.gateway_url, f"http://127.0.0.1:{port}"))
            finally:
                await second.stop()


@dataclass(slots=True)
class _Load:
    """Requests of the limited tenant."""

    admitted: list[float] = field(default_factory=list)
    """Times at which groupers admitted requests, Unix seconds."""
    outcomes: Counter[str] = field(default_factory=Counter)


async def _limits(rig: _Rig, result: Result, *, seconds: float) -> None:
    """Load at four times the limit; a third of the way, a gateway is killed and started again."""
    load = _Load()
    clock = SystemClock()
    spacing_s = 60.0 / (TIMES * LIMIT)
    async with (
        httpx.AsyncClient(timeout=60.0, limits=httpx.Limits(max_connections=None)) as client,
        bench_producer(rig.mesh) as producer,
        asyncio.TaskGroup() as tasks,
    ):
        begun, begun_at = time.monotonic(), clock.now()
        tasks.create_task(_kill(rig, after_s=seconds / 3))
        number = 0
        while time.monotonic() - begun < seconds:
            door = number % 3
            ask = (
                _over_amqp(producer, load)
                if door == 2
                else _over_http(client, rig.urls[door], load)
            )
            tasks.create_task(ask)
            number += 1
            await asyncio.sleep(max(0.0, begun + number * spacing_s - time.monotonic()))
    most = _most_in_a_minute(load.admitted)
    # The first seconds fill the window; from then on, each minute has what the limit allows.
    least = _least_in_a_minute(load.admitted, begun_at + START_S, begun_at + seconds)
    result.figures |= {
        "requests": number,
        "outcomes": dict(load.outcomes),
        "most admitted in a sliding minute": most,
        "least admitted in a sliding minute": least,
    }
    result.lines += [
        Line(
            name=f"most of a tenant's requests in a sliding minute, over its limit of {LIMIT}",
            value=most / LIMIT,
            bound=1.05,
        ),
        Line(
            name=f"{LEAST} over the least of its requests in a sliding minute",
            value=None if least is None else LEAST / max(1, least),
            bound=1.0,
        ),
    ]


async def _kill(rig: _Rig, *, after_s: float) -> None:
    await asyncio.sleep(after_s)
    rig.second.signal(signal.SIGKILL)
    await rig.second.wait()
    await rig.second.start()


async def _over_http(client: httpx.AsyncClient, url: str, load: _Load) -> None:
    body = {"model": MODEL, "prompt": "queues", "max_tokens": 2, "slo": {"ttlt_s": 60.0}}
    headers = {"authorization": f"Bearer {LIMITED}"}
    try:
        asked = SystemClock().now()
        answer = await client.post(f"{url}/v1/completions", json=body, headers=headers)
    except httpx.TransportError:
        load.outcomes["gateway away"] += 1
        return
    load.outcomes[f"HTTP {answer.status_code}"] += 1
    if answer.status_code == 200:
        load.admitted.append(asked)


async def _over_amqp(producer: Producer, load: _Load) -> None:
    body = InferenceRequest(
        model=MODEL, prompt="queues", max_tokens=2, tenant=LIMITED, slo=Slo(ttlt_s=60.0)
    )
    generation = await producer.submit(body, reply=ReplyMode.FINAL)
    final = await generation.final()
    if isinstance(final, RequestCompleted):
        load.outcomes["AMQP completed"] += 1
        load.admitted.append(final.timings.grouped_at)
    else:
        load.outcomes[f"AMQP {final.error.status}"] += 1


def _most_in_a_minute(times: list[float]) -> int:
    ordered = np.sort(times)
    ends = np.searchsorted(ordered, ordered + WINDOW_S, side="left")
    return int((ends - np.arange(len(ordered))).max(initial=0))


def _least_in_a_minute(times: list[float], since: float, until: float) -> int | None:
    """Least number of *times* in a minute within *since* and *until*; None if none fits."""
    ordered = np.sort(times)
    starts = np.arange(since, until - WINDOW_S, 0.5)
    if not len(starts):
        return None
    numbers = np.searchsorted(ordered, starts + WINDOW_S) - np.searchsorted(ordered, starts)
    return int(numbers.min())


async def _claims(rig: _Rig, result: Result, *, pairs: int, greedy: int) -> None:
    """
    First tokens of another tenant, while a batch tenant claims tight targets, and while it sends
    the same requests without claims.
    """
    ratios, p95_ms = [], []
    async with bench_producer(rig.mesh) as producer:
        alone_s = await _probes(producer, 6.0)
        for number in range(pairs):
            arms = {}
            for claims in (False, True) if number % 2 else (True, False):
                arms[claims] = await _arm(producer, greedy, claims=claims)
            p95_ms.append({"without claims": 1000 * arms[False], "with claims": 1000 * arms[True]})
            ratios.append(arms[True] / arms[False])
    result.figures |= {
        "requests of the batch tenant": greedy,
        "p95 of others' first tokens, no batch, ms": round(1000 * _p95(alone_s), 1),
        "p95 of others' first tokens, ms": [
            {name: round(value, 1) for name, value in pair.items()} for pair in p95_ms
        ],
    }
    result.lines.append(
        Line(
            name="p95 of others' first tokens if a batch claims 0.05 s, over without claims",
            value=float(np.median(ratios)),
            bound=RATIO_P95,
        )
    )


async def _arm(producer: Producer, greedy: int, *, claims: bool) -> float:
    """95th percentile of times to first tokens, while *greedy* requests of the batch tenant run."""
    seconds = greedy / GREEDY_RPS
    async with asyncio.TaskGroup() as tasks:
        for number in range(greedy):
            tasks.create_task(_batch(producer, number / GREEDY_RPS, claims=claims))
        times = await _probes(producer, seconds)
    return _p95(times)


def _p95(times: list[float]) -> float:
    return float(np.quantile(times, 0.95))


async def _batch(producer: Producer, after_s: float, *, claims: bool) -> None:
    await asyncio.sleep(after_s)
    body = InferenceRequest(
        model=MODEL,
        prompt="a batch that claims to be urgent " * 4,
        max_tokens=32,
        ignore_eos=True,
        tenant=BATCH,
        slo=Slo(ttft_s=0.05, tbt_s=0.02) if claims else Slo(ttlt_s=300.0),
        priority=1000 if claims else 0,
    )
    generation = await producer.submit(body, reply=ReplyMode.FINAL)
    await generation.final()


async def _probes(producer: Producer, seconds: float) -> list[float]:
    """Times from publish to first token of interactive requests of another tenant."""
    times: list[float] = []

    async def probe() -> None:
        body = InferenceRequest(
            model=MODEL,
            prompt="an interactive request",
            max_tokens=8,
            ignore_eos=True,
            tenant=PROBING,
            slo=Slo(ttft_s=1.0, tbt_s=0.2),
        )
        generation = await producer.submit(body, reply=ReplyMode.FINAL)
        final = await generation.final()
        if isinstance(final, RequestCompleted):
            times.append(final.timings.first_token_at - final.timings.arrived_at)

    begun = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(seconds * PROBE_RPS)):
            tasks.create_task(probe())
            await asyncio.sleep(max(0.0, begun + (number + 1) / PROBE_RPS - time.monotonic()))
    await poll_until(lambda: bool(times), timeout_s=5.0)
    return times
