"""
Cost of the mesh around an engine, compared with `vllm serve` on the same bodies.

`vllm serve` and a mesh with one vLLM engine of the same model serve the same chats in alternating
rounds. In the mesh, the gateway passes bodies on, the agent's engine host reads them with vLLM's
application, and each request and its events pass RabbitMQ. CPU time is that of all processes with
their engines.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

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
from services.mesh.processes import ProcessMesh
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import TINY_MODELS, make_tiny_models

MODEL = ModelName("tiny-llama")
STOCK, MESH = "vllm serve", "mesh"
MOST_CPU, MOST_OF_A_KIND = 1.8, 2.4
"""
Bounds of the CPU time per request of the mesh, over that of `vllm serve`; a larger model than the
tiny one, which computes almost nothing, has a smaller ratio.
"""
MOST_LATER_MS = 40.0
"""Bound of the mean time to the first event of the mesh, after that of `vllm serve`."""
GPU_SHARE = 0.4
"""Share of a GPU's memory of each of the two engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server of the bodies, and its processes."""

    url: str
    pids: Mapping[str, int]
    """Name of a process -> its id; the CPU time of its children is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One kind of requests in one round."""

    answers: Served
    cpu_ms: Mapping[str, float]
    """Process -> its CPU time per request."""

    @property
    def all_ms(self) -> float:
        return sum(self.cpu_ms.values())


Rounds = Mapping[str, Mapping[str, list[Round]]]
"""Server -> kind of requests -> its rounds."""


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
            registry=_registry(root / "registry.json", entry),
            log_dir=root / "log",
            gateway_port=free_port(),
            log_level="warning",
            agents=(AgentSpec(instance_id="a", engine="vllm", settings={"initial_model": MODEL}),),
        )
        async with (
            stock_server(_stock_arguments(entry), root / "stock.log") as stock,
            ProcessMesh(spec) as mesh,
        ):
            processes = {
                "gateway": mesh.processes["gateway"].pid,
                "agent with engine": mesh.processes["agent-a"].pid,
                "broker": broker_pid(url),
            }
            servers = {
                STOCK: Server(url=stock.url, pids={"server with engine": stock.pid}),
                MESH: Server(url=spec.gateway_url, pids=processes),
            }
            found = await _measured(servers, rounds, number, seed)
    report(result, found)
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


def _registry(path: Path, entry: ModelEntry) -> Path:
    write_registry(path, [entry])
    return path


async def _measured(servers: Mapping[str, Server], rounds: int, number: int, seed: int) -> Rounds:
    """Rounds of each server by kind."""
    found: dict[str, dict[str, list[Round]]] = {
        name: {kind: [] for kind in KINDS} for name in servers
    }
    for server in servers.values():  # warm-up: caches, grammars, connections
        for kind in KINDS:
            await served(server.url, bodies(kind, MODEL, 4, seed - 1))
    for index in range(rounds):
        for name, server in servers.items():
            for kind in KINDS:
                asked = bodies(kind, MODEL, number, seed + index)
                before = {each: computed_s(pid) for each, pid in server.pids.items()}
                answers = await served(server.url, asked)
                cpu_ms = {
                    each: 1e3 * (computed_s(pid) - before[each]) / number
                    for each, pid in server.pids.items()
                }
                found[name][kind].append(Round(answers=answers, cpu_ms=cpu_ms))
        say(f"round {index + 1} of {rounds}")
    return found


def report(result: Result, rounds: Rounds) -> None:
    """Add figures and acceptance lines."""
    for name, by_kind in rounds.items():
        whole = [each for of_kind in by_kind.values() for each in of_kind]
        for process in whole[0].cpu_ms:
            result.figures[f"CPU ms per request, {name}, {process}"] = spread(
                [each.cpu_ms[process] for each in whole]
            )
        result.figures[f"CPU ms per request, {name}, all processes"] = spread(
            [each.all_ms for each in whole]
        )
        result.figures[f"first event, ms, {name}"] = spread(
            [each.answers.first_ms for each in whole]
        )
        events = sum(each.answers.events for each in whole)
        streams = sum(each.answers.requests // 2 for each in whole)
        result.figures[f"events per streamed answer, {name}"] = round(events / streams, 1)
    ratios = {kind: _ratio(rounds, (kind,)) for kind in KINDS}
    result.figures |= {f"CPU, mesh over `vllm serve`, {kind}": r for kind, r in ratios.items()}
    pairs = [
        (ours.answers, theirs.answers)
        for kind in KINDS
        for ours, theirs in zip(rounds[MESH][kind], rounds[STOCK][kind], strict=True)
    ]
    result.lines += [
        Line(
            name="CPU per request of all processes, mesh over `vllm serve`, means",
            value=_ratio(rounds, tuple(KINDS)),
            bound=MOST_CPU,
        ),
        Line(
            name="CPU per request of all processes, mesh over `vllm serve`, worst kind",
            value=max(ratios.values()),
            bound=MOST_OF_A_KIND,
        ),
        Line(
            name="first event, mesh after `vllm serve`, ms, means",
            value=float(np.mean([ours.first_ms - theirs.first_ms for ours, theirs in pairs])),
            bound=MOST_LATER_MS,
        ),
        Line(
            name="rounds of a kind with another number of tokens",
            value=sum(ours.tokens != theirs.tokens for ours, theirs in pairs),
            bound=0,
        ),
    ]


def _ratio(rounds: Rounds, kinds: tuple[str, ...]) -> float:
    """CPU time of the mesh over that of `vllm serve`, of all rounds of *kinds*."""
    ours, theirs = (
        sum(each.all_ms for kind in kinds for each in rounds[name][kind]) for name in (MESH, STOCK)
    )
    return ours / theirs
