"""
Cost of the gateway's front `vllm`, compared with vLLM's own API server on the same bodies.

Both render prompts, detokenize, parse tools and write answers with the same code of vLLM. The
front also publishes each request to RabbitMQ and reads its replies. `vllm serve` and a mesh with
one vLLM engine of the same model serve the same chats in alternating rounds; a second gateway of
the mesh has the front `bodies`, whose bodies the engine host reads. CPU time is that of the front's
process alone. For the fronts of the mesh, the CPU time of the agent with its engine and of the
broker, the sum of all three, and the time to the first event are reported beside it.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np
import psutil

from ops.bench.cores import computed_s
from ops.bench.given_model import given_model
from ops.bench.overhead_arms import broker_pid
from ops.bench.progress import say
from ops.bench.result import Line, Result, spread
from ops.bench.surface_load import KINDS, Served, bodies, served
from ops.bench.vllm_serve import stock_server
from ops.devices import gpus
from ops.environment import broker_for
from ops.ports import free_port
from services.engine_core.serve_arguments import serve_arguments
from services.mesh.processes import MeshProcess, ProcessMesh
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import TINY_MODELS, make_tiny_models

MODEL = ModelName("tiny-llama")
STOCK, FRONT, BODIES = "vllm serve", "front vllm", "front bodies"
MESH_FRONTS = (FRONT, BODIES)
MOST_OVERALL, MOST_OF_A_KIND = 1.4, 1.6
MOST_OF_ALL, MOST_LATER_MS = 1.02, 2.0
"""Bounds of the front `bodies` over the front `vllm`."""
MANY_MODELS = 20
READY_S = 120.0
GPU_SHARE = 0.4
"""Share of a GPU's memory of each of the two engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningFront:
    """A front that serves."""

    url: str
    pid: int
    ready_s: Seconds = 0.0
    """Time from the start of the process until it was ready; 0 if not measured."""


Rounds = Mapping[str, Mapping[str, list[Served]]]
"""Front -> kind of requests -> its answers in each round."""
Beside = Mapping[str, Mapping[str, list[float]]]
"""Front of the mesh -> process beside it -> its CPU ms per request in each round."""


async def run(*, seed: int, quick: bool, broker: str | None, model: Path | None = None) -> Result:
    """Run the benchmark; a quick run has two short rounds instead of five."""
    rounds, number = (2, 8) if quick else (5, 48)
    result = Result(name="surface", seed=seed, quick=quick)
    with broker_for(broker) as (url, line), tempfile.TemporaryDirectory() as directory:
        if url == EMBEDDED:
            raise SettingsError(f"this benchmark needs RabbitMQ; {line}")
        root = Path(directory)
        entry = _entry(root, model)
        spec = MeshSpec(
            broker=url,
            registry=_registry(root / "one.json", entry, 1),
            log_dir=root / "log",
            gateway_port=free_port(),
            gateway={"front": "vllm"},
            log_level="warning",
            agents=(AgentSpec(instance_id="a", engine="vllm", settings={"initial_model": MODEL}),),
        )
        async with (
            stock_server(_stock_arguments(entry), root / "stock.log") as stock,
            ProcessMesh(spec) as mesh,
            gateway(spec, BODIES, front="bodies", registry=spec.registry) as passing,
        ):
            fronts = {
                STOCK: RunningFront(url=stock.url, pid=stock.pid),
                FRONT: RunningFront(url=spec.gateway_url, pid=mesh.processes["gateway"].pid),
                BODIES: passing,
            }
            beside = {"agent with engine": mesh.processes["agent-a"].pid, "broker": broker_pid(url)}
            loads, others_ms = await _measured(fronts, beside, rounds, number, seed)
        result.figures["memory and start"] = await _starts(spec, entry, root)
    report(result, loads)
    report_mesh(result, loads, others_ms)
    return result


def _entry(root: Path, given: Path | None) -> ModelEntry:
    if given is None:
        models = make_tiny_models(root / "models", models={MODEL: TINY_MODELS[MODEL]})
        entry = ModelRegistry.load(models).entry(MODEL)
    else:
        entry = given_model(given, MODEL)
    # Without this setting models with random weights write whitespace without end.
    grammars = {"backend": "xgrammar", "disable_any_whitespace": True}
    engine_args: dict[str, object] = {"structured_outputs_config": grammars}
    if gpus():
        engine_args |= {"gpu_memory_utilization": GPU_SHARE, "enforce_eager": True}
    return msgspec.structs.replace(entry, tool_parser="hermes", engine_args=engine_args)


def _stock_arguments(entry: ModelEntry) -> list[str]:
    """Arguments of `vllm serve` with the same data type and memory as the mesh's engine."""
    arguments = serve_arguments(entry, [MODEL])
    if gpus():
        arguments += ["--dtype", "auto", "--gpu-memory-utilization", str(GPU_SHARE)]
    return arguments


def _registry(path: Path, entry: ModelEntry, number: int) -> Path:
    """A registry with the model under *number* names, each a base model of its own."""
    names = (MODEL, *(ModelName(f"{MODEL}-{index}") for index in range(1, number)))
    write_registry(path, (msgspec.structs.replace(entry, name=name) for name in names))
    return path


@asynccontextmanager
async def gateway(
    spec: MeshSpec, name: str, *, front: str, registry: Path
) -> AsyncIterator[RunningFront]:
    """
    Another gateway of the mesh *spec*.

    Raises:
        EngineError: The gateway is not ready after `READY_S`.
    """
    port = free_port()
    service, settings = spec.service_settings()["gateway"]
    process = MeshProcess(
        name.replace(" ", "-"),
        service=service,
        settings=settings | {"front": front, "port": port, "registry": str(registry)},
        directory=spec.log_dir,
    )
    url, began = f"http://127.0.0.1:{port}", time.monotonic()
    await process.start()
    try:
        await _ready(url, process)
        yield RunningFront(url=url, pid=process.pid, ready_s=time.monotonic() - began)
    finally:
        await process.stop()


async def _ready(url: str, process: MeshProcess) -> None:
    give_up_at = time.monotonic() + READY_S
    async with httpx.AsyncClient(base_url=url) as client:
        while process.running and time.monotonic() < give_up_at:
            try:
                if (await client.get("/ready")).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
    raise EngineError(f"the gateway is not ready; the end of its log:\n{process.last_lines()}")


async def _measured(
    fronts: Mapping[str, RunningFront],
    beside: Mapping[str, int],
    rounds: int,
    number: int,
    seed: int,
) -> tuple[Rounds, Beside]:
    """Answers of each front by kind and round, and what the mesh's other processes computed."""
    loads: dict[str, dict[str, list[Served]]] = {
        name: {kind: [] for kind in KINDS} for name in fronts
    }
    others_ms: dict[str, dict[str, list[float]]] = {
        name: {each: [] for each in beside} for name in MESH_FRONTS
    }
    for front in fronts.values():  # warm-up: caches, grammars, connections
        for kind in KINDS:
            await served(front.url, front.pid, bodies(kind, MODEL, 4, seed - 1))
    for index in range(rounds):
        for name, front in fronts.items():
            before = {each: computed_s(pid) for each, pid in beside.items()}
            for kind, found in loads[name].items():
                asked = bodies(kind, MODEL, number, seed + index)
                found.append(await served(front.url, front.pid, asked))
            for each, found_ms in others_ms.get(name, {}).items():
                used_s = computed_s(beside[each]) - before[each]
                found_ms.append(1e3 * used_s / (number * len(KINDS)))
        say(f"round {index + 1} of {rounds}")
    return loads, others_ms


async def _starts(spec: MeshSpec, entry: ModelEntry, root: Path) -> dict[str, object]:
    """Time until a front is ready, and its resident memory, with one and with many models."""
    found: dict[str, object] = {}
    for number in (1, MANY_MODELS):
        registry = _registry(root / f"{number}.json", entry, number)
        async with gateway(spec, f"start-{number}", front="vllm", registry=registry) as front:
            memory_mb = psutil.Process(front.pid).memory_info().rss / 1e6
            found[f"{number} models"] = f"{front.ready_s:.1f} s, {memory_mb:.0f} MB"
    return found


def report(result: Result, loads: Rounds) -> None:
    """Add figures and acceptance lines."""
    for name, by_kind in loads.items():
        for kind, rounds in by_kind.items():
            result.figures[f"CPU ms per request, {name}, {kind}"] = spread(
                [each.cpu_ms for each in rounds]
            )
    ratios = {kind: _ratios(loads, (kind,)) for kind in KINDS}
    overall = _ratios(loads, tuple(KINDS))
    result.figures |= {f"ratio, {kind}": spread(values) for kind, values in ratios.items()}
    result.figures["ratio, all kinds"] = spread(overall)
    result.figures["events per streamed answer"] = {
        name: round(_events(by_kind), 1) for name, by_kind in loads.items()
    }
    different = sum(
        ours.tokens != theirs.tokens
        for kind in KINDS
        for ours, theirs in zip(loads[FRONT][kind], loads[STOCK][kind], strict=True)
    )
    result.lines += [
        Line(
            name="CPU per request, front over `vllm serve`, median of rounds",
            value=float(np.median(overall)),
            bound=MOST_OVERALL,
        ),
        Line(
            name="CPU per request, front over `vllm serve`, worst kind",
            value=max(float(np.median(values)) for values in ratios.values()),
            bound=MOST_OF_A_KIND,
        ),
        Line(name="rounds of a kind with another number of tokens", value=different, bound=0),
    ]


def report_mesh(result: Result, loads: Rounds, beside: Beside) -> None:
    """Add the CPU time of all processes, and first tokens, of the two fronts of the mesh."""
    all_ms: dict[str, list[float]] = {}
    first_ms: dict[str, list[float]] = {}
    for name, others in beside.items():
        result.figures |= {
            f"CPU ms per request, {each}, {name}": spread(ms) for each, ms in others.items()
        }
        own = [
            sum(each.cpu_ms for each in of_round) / len(KINDS)
            for of_round in zip(*loads[name].values(), strict=True)
        ]
        all_ms[name] = [sum(each) for each in zip(own, *others.values(), strict=True)]
        first_ms[name] = [
            float(np.mean([each.first_ms for each in of_round]))
            for of_round in zip(*loads[name].values(), strict=True)
        ]
        result.figures[f"CPU ms per request, all processes, {name}"] = spread(all_ms[name])
        result.figures[f"first event, ms, {name}"] = spread(first_ms[name])
    result.lines += [
        Line(
            name="CPU per request of all processes, front bodies over front vllm, means",
            value=float(np.mean(all_ms[BODIES]) / np.mean(all_ms[FRONT])),
            bound=MOST_OF_ALL,
        ),
        Line(
            name="first event, front bodies after front vllm, ms, means",
            value=float(np.mean(first_ms[BODIES]) - np.mean(first_ms[FRONT])),
            bound=MOST_LATER_MS,
        ),
    ]


def _ratios(loads: Rounds, kinds: tuple[str, ...]) -> list[float]:
    """CPU time per request of the front over that of `vllm serve`, by round."""
    rounds = range(len(loads[FRONT][kinds[0]]))
    return [
        sum(loads[FRONT][kind][index].cpu_ms for kind in kinds)
        / sum(loads[STOCK][kind][index].cpu_ms for kind in kinds)
        for index in rounds
    ]


def _events(by_kind: Mapping[str, list[Served]]) -> float:
    answers = [each for rounds in by_kind.values() for each in rounds]
    return sum(each.events for each in answers) / sum(each.requests // 2 for each in answers)
