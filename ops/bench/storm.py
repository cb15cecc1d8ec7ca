"""
Benchmark of the public client in a storm.

Two programs with the wheel, in an environment of its own, submit the same requests to a mesh whose
processes are killed and frozen and whose broker restarts, again and again. Each request must be
answered, each stream must equal its final, and both programs must get the same answers.
"""

import asyncio
import contextlib
import json
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ops.bench.meshes import MODEL, simulated_agent
from ops.bench.result import Line, Result
from ops.broker import PrivateNode, rabbitmq_binary
from ops.clients.installed import python_with
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
"""Requests per second of both programs together."""
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
PROGRAMS = ("first", "second")
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
CLIENT = Path(__file__).parent / "storm_client.py"


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark on a private RabbitMQ node, which it restarts."""
    del broker  # another broker could not be restarted
    if rabbitmq_binary("rabbitmq-server") is None:
        raise SettingsError("this benchmark restarts its broker: install rabbitmq-server")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        python = python_with(build_wheel(root / "dist"), root / "python")
        return await storm(python, root, num_requests=200 if quick else 2500, seed=seed)


async def storm(python: Path, root: Path, *, num_requests: int, seed: int) -> Result:
    """
    Serve *num_requests*, half of them from each program, while processes are disturbed.

    Args:
        python: Interpreter that has the wheel.
        root: Folder for the files of the broker and the mesh.
        num_requests: Number of requests of both programs together.
        seed: Seed of the disturbances and their times.
    """
    each = [job(number) for number in range(num_requests // 2)]
    random = np.random.default_rng(seed)
    async with _mesh(root) as (node, mesh):
        stop = asyncio.Event()
        havoc = asyncio.create_task(_havoc(mesh, node, random, stop), name="havoc")
        try:
            answers = await asyncio.gather(
                *(_drive(python, name, node.url, each) for name in PROGRAMS)
            )
        finally:
            stop.set()
            disturbances = await havoc
    result = Result(name="storm", seed=seed, quick=num_requests < 2500)
    result.figures["disturbances"] = dict(disturbances)
    for name, found in zip(PROGRAMS, answers, strict=True):
        result.figures |= {
            f"answers, {name}": sum("error" not in answer for answer in found),
            f"errors, {name}": dict(Counter(a["error"] for a in found if "error" in a)),
        }
        result.lines += lines(name, found, len(each))
    one, other = ({answer["number"]: answer.get("tokens") for answer in found} for found in answers)
    unequal = sum(one.get(number) != other.get(number) for number in range(len(each)))
    result.lines.append(
        Line(name="answers that differ between the programs", value=float(unequal), bound=0.0)
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
    """Acceptance lines of one program: lost and doubled answers, and streams unlike their final."""
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
    python: Path, name: str, url: str, jobs: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """
    Answers of one program.

    Raises:
        MeshError: It fails.
    """
    process = await asyncio.create_subprocess_exec(
        *(str(python), "-I", str(CLIENT), url, str(LIMIT_S), name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate("\n".join(map(json.dumps, jobs)).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise MeshError(f"{CLIENT.name} ended with code {process.returncode}")
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
