"""A batch beside interactive load; its gateway is killed, its broker and database restart."""

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ops.bench.batch_mesh import (
    GIVE_UP_S,
    Load,
    Rig,
    ask,
    batch_mesh,
    create,
    custom_ids,
    lines_of,
    loaded,
    polled,
)
from ops.bench.postgres import PrivatePostgres, running_postgres
from ops.bench.result import Line, Result
from services.agent.backends.settings import SimulatedSettings
from shared.contracts.qos import Slo
from shared.producer.producer import Producer

NUM_KILLS = 3
MOST_GROWTH_MIB = 150.0


async def batch_with_kills(result: Result, *, seed: int, num_lines: int) -> None:
    """
    Serve a batch, kill the gateway, restart the broker and the database, and look for each line in
    the results.

    Args:
        result: Gets the figures and lines.
        seed: Seed of the arrivals of interactive requests.
        num_lines: Number of lines of the batch.

    Raises:
        SettingsError: RabbitMQ or PostgreSQL is not installed.
    """
    with running_postgres() as database:
        url = database.url(await database.create())
        async with batch_mesh(SimulatedSettings(time_scale=0.2), url) as rig:
            await _kills(rig, database, result, np.random.default_rng(seed), num_lines)


async def _kills(
    rig: Rig,
    database: PrivatePostgres,
    result: Result,
    random: np.random.Generator,
    num_lines: int,
) -> None:
    content = lines_of(num_lines, 16)
    steps = [num_lines * (number + 1) // (NUM_KILLS + 2) for number in range(NUM_KILLS + 1)]
    growth = 0.0
    async with loaded(rig, _interactive(random, rate_rps=5.0)):
        batch_id = await create(rig, content, "24h")
        base = _memory_mib(rig)
        batch: dict[str, Any] = {}
        async with asyncio.timeout(GIVE_UP_S):
            async for batch in polled(rig, batch_id):
                growth = max(growth, _memory_mib(rig) - base)
                if not steps or batch["request_counts"]["completed"] < steps[0]:
                    continue
                steps.pop(0)
                if steps:
                    await _kill_gateway(rig)
                    base = _memory_mib(rig)
                else:
                    await asyncio.to_thread(rig.node.stop)
                    await asyncio.to_thread(database.stop)
                    await asyncio.to_thread(database.start)
                    await asyncio.to_thread(rig.node.start)
    output = await custom_ids(rig, batch["output_file_id"])
    errors = await custom_ids(rig, batch["error_file_id"])
    times = Counter(output + errors)
    wrong = sum(times[f"c{number}"] != 1 for number in range(num_lines))
    result.figures |= {
        "lines, with three kills and restarts of broker and database": num_lines,
        "status": batch["status"],
        "lines of the error file": len(errors),
        "growth of the gateway, MiB": growth,
    }
    result.lines += [
        Line(name="lines that are not in the results once", value=float(wrong), bound=0.0),
        Line(name="lines that failed", value=float(len(errors)), bound=0.0),
        Line(name="growth of the gateway, MiB", value=growth, bound=MOST_GROWTH_MIB),
    ]


def _interactive(random: np.random.Generator, *, rate_rps: float) -> Load:
    async def load(producer: Producer) -> AsyncIterator[None]:
        while True:
            await ask(producer, slo=Slo(ttft_s=2.0, tbt_s=0.2))
            await asyncio.sleep(random.exponential(1 / rate_rps))
            yield

    return load


async def _kill_gateway(rig: Rig) -> None:
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


def _memory_mib(rig: Rig) -> float:
    """Resident memory of the gateway; 0 while it is not running."""
    try:
        status = Path(f"/proc/{rig.mesh.processes['gateway'].pid}/status").read_text()
    except OSError:
        return 0.0
    lines = (line.split() for line in status.splitlines())
    return next((int(each[1]) / 1024 for each in lines if each[0] == "VmRSS:"), 0.0)
