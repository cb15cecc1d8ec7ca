"""
Benchmark of the public clients in a storm.

The wheel and the npm package, each in an environment of its own, submit the same requests to a mesh
whose processes are killed and frozen and whose broker restarts, again and again. Each request must
be answered, each stream must equal its final, and both clients must get the same answers.
"""

import asyncio
import contextlib
import json
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ops.bench.meshes import MODEL, simulated_agent
from ops.bench.result import Line, Result
from ops.broker import PrivateNode, rabbitmq_binary
from ops.clients.installed import node_with, python_with
from ops.clients.npm import build_npm
from ops.clients.wheel import build_wheel
from ops.ports import free_port
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from services.mesh.spec import MeshSpec
from shared.contracts.errors import MeshError, SettingsError
from shared.contracts.estimates import LatencyCoefficients
from shared.models.tiny import make_tiny_models
from shared.runtime.tasks import pause

RATE_RPS = 16.0
"""Requests per second of both clients together."""
MAX_TOKENS = 80
LIMIT_S = 300.0
"""Time after which a request without an end counts as lost."""
FROZEN_S = 4.0
RESTART_S = 1.0
CALM_S = 3.0
"""Mean time between two disturbances."""
ENGINE = SimulatedSettings(
    latency=LatencyCoefficients(constant_s=0.008, linear_s=4e-5, context_s=2e-7), max_running=24
)
SLOS: tuple[dict[str, float] | None, ...] = ({"ttft_s": 5.0, "tbt_s": 1.0}, {"ttlt_s": 120.0}, None)
AGENTS = ("agent-a0", "agent-a1", "agent-a2")
DISTURBANCES = (
    ("kill", "agent-a0"),
    ("restart", "broker"),
    ("freeze", "agent-a1"),
    ("kill", "grouper-0"),
    ("kill", "leader-0"),
    ("freeze", "grouper-1"),
    ("kill", "agent-a2"),
    ("freeze", "leader-1"),
    ("kill", "grouper-1"),
    ("kill", "leader-1"),
    ("kill", "agent-a1"),
    ("freeze", "agent-a0"),
)
"""What happens to which process, in turn."""
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Drivers:
    """Commands that submit requests through each client."""

    python: tuple[str, ...]
    javascript: tuple[str, ...]


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark on a private RabbitMQ node, which it restarts."""
    del broker  # another broker could not be restarted
    if rabbitmq_binary("rabbitmq-server") is None:
        raise SettingsError("this benchmark restarts its broker: install rabbitmq-server")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        wheel, tarball = build_wheel(root / "dist"), build_npm(root / "dist")
        drivers = drivers_with(
            python_with(wheel, root / "python"), node_with(tarball, root / "node")
        )
        return await storm(drivers, root, num_requests=200 if quick else 2500, seed=seed)


def drivers_with(interpreter: Path, node_folder: Path) -> Drivers:
    """The drivers, with a Python that has the wheel and a folder that has the npm package."""
    program = shutil.copy(HERE / "storm_client.mjs", node_folder)
    return Drivers(
        python=(str(interpreter), "-I", str(HERE / "storm_client.py")),
        javascript=("node", str(program)),
    )


async def storm(drivers: Drivers, root: Path, *, num_requests: int, seed: int) -> Result:
    """
    Serve *num_requests*, half of them from each client, while processes are disturbed.

    Args:
        drivers: Commands of both clients.
        root: Folder for the files of the broker and the mesh.
        num_requests: Number of requests of both clients together.
        seed: Seed of the disturbances and their times.
    """
    each = [job(number) for number in range(num_requests // 2)]
    random = np.random.default_rng(seed)
    async with _mesh(root) as (node, mesh):
        stop = asyncio.Event()
        havoc = asyncio.create_task(_havoc(mesh, node, random, stop), name="havoc")
        try:
            answers = await asyncio.gather(
                _drive(drivers.python, node.url, each), _drive(drivers.javascript, node.url, each)
            )
        finally:
            stop.set()
            disturbances = await havoc
    result = Result(name="storm", seed=seed, quick=num_requests < 2500)
    result.figures["disturbances"] = dict(disturbances)
    for name, found in zip(("Python", "JavaScript"), answers, strict=True):
        result.figures |= {
            f"answers, {name}": sum("error" not in answer for answer in found),
            f"errors, {name}": dict(Counter(a["error"] for a in found if "error" in a)),
        }
        result.lines += lines(name, found, len(each))
    python, javascript = (
        {answer["number"]: answer.get("tokens") for answer in found} for found in answers
    )
    unequal = sum(python.get(number) != javascript.get(number) for number in range(len(each)))
    result.lines.append(
        Line(name="answers that differ between the clients", value=float(unequal), bound=0.0)
    )
    return result


def job(number: int) -> dict[str, Any]:
    """One request with its time; equal numbers give equal requests."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "prompt": f"request {number} asks for a long and steady answer " * (1 + number % 5),
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "reply": "stream" if number % 4 else "final",
    }
    if (slo := SLOS[number % len(SLOS)]) is not None:
        fields["slo"] = slo
    return {"number": number, "at_s": 2 * number / RATE_RPS, "fields": fields}


def lines(name: str, answers: Sequence[dict[str, Any]], expected: int) -> list[Line]:
    """Acceptance lines of one client: lost and doubled answers, and streams unlike their final."""
    good = [answer for answer in answers if "error" not in answer]
    lost = expected - len({answer["number"] for answer in good})
    doubled = len(good) - len({answer["number"] for answer in good})
    unlike = sum(
        (answer["streamed"], answer["streamed_text"]) != (answer["tokens"], answer["text"])
        for answer in good
    )
    return [
        Line(name=f"{name}: lost of {expected}", value=float(lost), bound=0.0),
        Line(name=f"{name}: doubled", value=float(doubled), bound=0.0),
        Line(name=f"{name}: streams unlike their final", value=float(unlike), bound=0.0),
    ]


@contextlib.asynccontextmanager
async def _mesh(root: Path) -> AsyncIterator[tuple[PrivateNode, ProcessMesh]]:
    """Two leaders, two groupers and three instances on a private broker."""
    node = PrivateNode(root / "broker")
    node.start()
    try:
        spec = MeshSpec(
            broker=node.url,
            registry=make_tiny_models(root / "models", weights=False),
            log_dir=root / "log",
            gateway_port=free_port(),
            gateway={"front": "bodies"},
            log_level="warning",
            agents=tuple(simulated_agent(name.removeprefix("agent-"), ENGINE) for name in AGENTS),
            groupers=2,
            leaders=2,
        )
        async with ProcessMesh(spec) as mesh:
            yield node, mesh
    finally:
        node.close()


async def _drive(
    command: Sequence[str], url: str, jobs: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """
    Answers of one client.

    Raises:
        MeshError: Its program fails.
    """
    process = await asyncio.create_subprocess_exec(
        *command, url, str(LIMIT_S), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate("\n".join(map(json.dumps, jobs)).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise MeshError(f"{command[-1]} ended with code {process.returncode}")
    return [json.loads(line) for line in output.splitlines()]


async def _havoc(
    mesh: ProcessMesh, node: PrivateNode, random: np.random.Generator, stop: asyncio.Event
) -> Counter[str]:
    """Disturb one process after another until *stop*; return the number of each disturbance."""
    done: Counter[str] = Counter()
    for what, name in cycle(DISTURBANCES):
        if await pause(stop, CALM_S * random.uniform(0.5, 1.5)):
            break
        match what:
            case "kill":
                await mesh.kill(name)
                await asyncio.sleep(RESTART_S)
            case "freeze":
                mesh.processes[name].signal(signal.SIGSTOP)
                await asyncio.sleep(FROZEN_S)
                mesh.processes[name].signal(signal.SIGCONT)
            case "restart":
                await asyncio.to_thread(node.stop)
                await asyncio.to_thread(node.start)
        done[what] += 1
        # A supervisor would restart these processes.
        for process in mesh.processes.values():
            if not process.running:
                await process.start()
    return done
