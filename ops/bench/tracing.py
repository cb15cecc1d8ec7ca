"""
CPU time of tracing: a mesh that exports the traces of 10 % of its requests beside one without.

Each pair starts two meshes, each on its own virtual host or node, since one process may be slower
than another for its whole life. Both get the same streamed chat completions at the same Poisson
times, so that whatever slows the machine slows both. CPU time counts the processes of a mesh, with
the exports, and neither the broker nor the receiver; it includes what a mesh uses without requests.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack

import numpy as np

from ops.bench.chat import chat
from ops.bench.cores import computed_s
from ops.bench.meshes import MODEL, bench_mesh, simulated_agent
from ops.bench.overhead import prompt_of
from ops.bench.progress import say
from ops.bench.result import Line, Result, spread
from ops.otlp import OtlpReceiver, otlp_receiver
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import SettingsError

RATIO = 0.1
RATE_RPS = 40.0
MAX_TOKENS = 16
TTFT_S = 5.0
WARM_UP = 40
"""Number of requests before each measurement; not part of the figures."""
FIRST_EXPORT_S = 7.0
"""
Time after the warm-up within which every process has exported once, with the SDK's usual period of
5 s. The first export loads modules and connects, which requests do not repeat.
"""
BOUND = 1.03
OFF, ON = "off", "10 % of requests"
ENGINE = SimulatedSettings(max_running=64, kv_capacity_tokens=1 << 20)


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """
    Run the benchmark; a quick run has one pair with few requests, and measures no line.

    Raises:
        SettingsError: *broker* is the URL of one virtual host.
    """
    if broker not in (None, "private"):
        raise SettingsError(
            "tracing runs two meshes at a time, each on a virtual host of its own: leave out "
            "--broker, or use --broker private"
        )
    pairs, count = (1, 100) if quick else (5, 800)
    result = Result(name="tracing", seed=seed, quick=quick)
    used: dict[str, list[Seconds]] = {OFF: [], ON: []}
    with otlp_receiver() as receiver:
        for number in range(pairs):
            pair = await _pair(broker, receiver, count, seed + number, first=(OFF, ON)[number % 2])
            for arm, cpu_s in pair.items():
                used[arm].append(cpu_s)
            say(f"pair {number + 1} of {pairs}")
    report(result, used, receiver, num_requests=pairs * (count + WARM_UP))
    return result


def report(
    result: Result,
    used: Mapping[str, Sequence[Seconds]],
    receiver: OtlpReceiver,
    *,
    num_requests: int,
) -> None:
    """
    Add figures and acceptance lines.

    Args:
        result: Result of the bench.
        used: Arm -> CPU seconds per request, by pair.
        receiver: What the meshes with tracing have exported.
        num_requests: Number of requests to meshes with tracing.
    """
    ratios = [on / off for on, off in zip(used[ON], used[OFF], strict=True)]
    traces = {span.trace_id for span in receiver.spans}
    result.figures |= {
        f"CPU ms per request, {arm}": spread([1e3 * each for each in values])
        for arm, values in used.items()
    }
    result.figures |= {
        "CPU with tracing over CPU without, by pair": [round(each, 4) for each in ratios],
        "requests with tracing": num_requests,
        "traces received": len(traces),
        "spans received": len(receiver.spans),
        "spans per trace": round(len(receiver.spans) / max(1, len(traces)), 2),
    }
    median = None if result.quick else float(np.median(ratios))
    result.lines += [
        Line(name="CPU with tracing over CPU without, median of pairs", value=median, bound=BOUND),
        Line(name="meshes with tracing that exported nothing", value=float(not traces), bound=0.0),
    ]


async def _pair(
    broker: str | None, receiver: OtlpReceiver, count: int, seed: int, *, first: str
) -> dict[str, Seconds]:
    """Arm -> CPU seconds per request of a new mesh, both under the same load."""
    meshes: dict[str, ProcessMesh] = {}
    async with AsyncExitStack() as stack:
        for arm in (first, OFF if first == ON else ON):
            with _environment(_variables(receiver) if arm == ON else {}):
                mesh = bench_mesh(broker, (simulated_agent("bench", ENGINE),))
                meshes[arm] = await stack.enter_async_context(mesh)
        await _load_all(meshes, WARM_UP, seed - 1)
        await asyncio.sleep(FIRST_EXPORT_S)
        before = {arm: _used_s(mesh) for arm, mesh in meshes.items()}
        await _load_all(meshes, count, seed)
        return {arm: (_used_s(mesh) - before[arm]) / count for arm, mesh in meshes.items()}


def _used_s(mesh: ProcessMesh) -> Seconds:
    return sum(computed_s(process.pid) for process in mesh.processes.values())


async def _load_all(meshes: Mapping[str, ProcessMesh], count: int, seed: int) -> None:
    await asyncio.gather(*(_load(mesh, count, seed) for mesh in meshes.values()))


async def _load(mesh: ProcessMesh, count: int, seed: int) -> None:
    """Send *count* requests at Poisson times, and read all answers."""
    chance = random.Random(seed)
    began, at_s = time.monotonic(), 0.0
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            at_s += chance.expovariate(RATE_RPS)
            await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
            answer = chat(
                mesh.spec.gateway_port,
                ModelName(MODEL),
                prompt_of(chance),
                max_tokens=MAX_TOKENS,
                ttft_s=TTFT_S,
            )
            group.create_task(answer)


def _variables(receiver: OtlpReceiver) -> dict[str, str]:
    """Variables of a mesh that exports a share of its traces, with the SDK's usual batches."""
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}
    own = receiver.variables | sampler | {"OTEL_TRACES_SAMPLER_ARG": str(RATIO)}
    return {name: value for name, value in own.items() if name != "OTEL_BSP_SCHEDULE_DELAY"}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context in which *variables* are the only ones of OpenTelemetry for new processes."""
    kept = dict(os.environ)
    for name in kept:
        if name.startswith("OTEL_"):
            del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
