"""
Sends random bodies to a mesh, and checks what the mesh answers.

No body may get a status of 500 or above but 501, no request may stay in the mesh, and the gateway's
memory may not grow. Bodies come from the OpenAPI document of vLLM's own server. The result is
appended to `results/fuzz.jsonl` with the commit of the code.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from ops.bench.progress import say
from ops.environment import broker_for
from ops.fuzz.bodies import Bodies, Body, vllm_document
from ops.ports import free_port
from services.mesh.processes import ProcessMesh
from services.mesh.queues import count_queues
from services.mesh.spec import AgentSpec, MeshSpec
from shared.contracts.base import ModelName
from shared.contracts.lanes import LaneLayout
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_MODELS, make_tiny_models

MODEL = "tiny-llama"
VALID: dict[str, Body] = {
    "/v1/chat/completions": {
        "model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4,
    },
    "/v1/completions": {"model": MODEL, "prompt": "hello", "max_tokens": 4},
    "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": 4},
    "/v1/messages": {
        "model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4,
    },
    "/tokenize": {"model": MODEL, "prompt": "hello"},
    "/detokenize": {"model": MODEL, "tokens": [20, 21]},
}  # fmt: skip
LEAST_ACCEPTED = 0.3
MOST_GROWTH = 1.2
"""Largest resident memory at the end, relative to that after the first tenth of the bodies."""
TIMEOUT_S = 60.0
IN_FLIGHT = 16
SOFT = (
    *("headway.leader", "headway.estimator", "headway.work-queues", "headway.cancels"),
    *("headway.dead-letters", "headway.dead-letter-replies"),
)
"""Queues without open requests; dead letters are copies of requests that were refused."""


@dataclass(slots=True)
class Outcome:
    """What the mesh answered."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Bodies with a status of 500 or above, or without an answer."""
    memory_mb: list[float] = field(default_factory=list)
    """Resident memory of the gateway after each tenth of the bodies."""
    left: dict[str, int] = field(default_factory=dict)
    """Queue -> number of requests that stay in it."""


async def fuzz(spec: MeshSpec, bodies: Iterator[tuple[str, Body]], number: int) -> Outcome:
    """Send *number* of *bodies* to the mesh *spec*."""
    found, room = Outcome(), asyncio.Semaphore(IN_FLIGHT)
    async with (
        ProcessMesh(spec) as mesh,
        httpx.AsyncClient(base_url=spec.gateway_url, timeout=TIMEOUT_S) as client,
    ):

        async def one(route: str, body: Body) -> None:
            async with room:
                try:
                    # Random text may have characters that JSON cannot encode strictly.
                    answer = await client.post(route, json=body)
                    status, text = answer.status_code, answer.text
                except httpx.HTTPError as error:
                    status, text = 599, repr(error)
            found.statuses[status] += 1
            # 501: the body asks for a store, which this mesh does not have.
            if (
                status >= httpx.codes.INTERNAL_SERVER_ERROR
                and status != httpx.codes.NOT_IMPLEMENTED
            ):
                found.failures.append({"route": route, "body": body, "answer": text[:500]})

        gateway = psutil.Process(mesh.processes["gateway"].pid)
        for tenth in range(10):
            await asyncio.gather(*(one(*each) for each in islice(bodies, number // 10)))
            found.memory_mb.append(round(gateway.memory_info().rss / 1e6, 1))
            say(f"{tenth + 1} of 10 tenths: {dict(found.statuses)}")
        found.left = await _left(mesh)
    return found


async def _left(mesh: ProcessMesh) -> dict[str, int]:
    """Requests in the mesh's queues, after time for the last cancellations."""
    models = ModelRegistry.load(mesh.spec.registry).bases
    async with mesh.open_broker("headway-fuzz") as broker:
        for _ in range(20):
            counts = await count_queues(broker, models, LaneLayout())
            left = {each.queue: each.ready for each in counts if each.ready}
            left = {queue: count for queue, count in left.items() if queue not in SOFT}
            if not left:
                break
            await asyncio.sleep(0.5)
    return left


def report(found: Outcome, options: argparse.Namespace) -> dict[str, Any]:
    """The result as JSON-able data; `holds` by criterion."""
    number = sum(found.statuses.values())
    accepted = found.statuses[200] / number
    growth = found.memory_mb[-1] / found.memory_mb[0]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "seed": options.seed,
        "engine": options.engine,
        "bodies": number,
        "statuses": {str(status): count for status, count in sorted(found.statuses.items())},
        "accepted": round(accepted, 3),
        "memory_mb": found.memory_mb,
        "left": found.left,
        "failures": found.failures[:20],
        "holds": {
            "no status of 500 or above": not found.failures,
            "accepted share": accepted >= LEAST_ACCEPTED,
            "no request left": not found.left,
            "flat memory": growth <= MOST_GROWTH,
        },
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m ops.fuzz", description=__doc__)
    made.add_argument("--bodies", type=int, default=20_000, metavar="N")
    made.add_argument("--engine", default="simulated", choices=("simulated", "vllm"))
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--broker", metavar="URL", help="AMQP URL, or `private` for a separate node")
    made.add_argument("--json", action="store_true", help="the last line is the result as JSON")
    made.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    return made


def main() -> int:
    """Run the fuzzer; return 0 if every criterion holds."""
    options = parser().parse_args()
    with broker_for(options.broker) as (url, _), tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        models = {MODEL: TINY_MODELS[MODEL]}
        spec = MeshSpec(
            broker=url,
            registry=make_tiny_models(root / "m", weights=options.engine == "vllm", models=models),
            log_dir=root / "log",
            gateway_port=free_port(),
            log_level="warning",
            agents=(
                AgentSpec(
                    instance_id="a", engine=options.engine, settings={"initial_model": MODEL}
                ),
            ),
        )
        document = vllm_document(ModelRegistry.load(spec.registry).entry(ModelName(MODEL)))
        bodies = iter(Bodies(document, VALID, options.seed))
        found = report(asyncio.run(fuzz(spec, bodies, options.bodies)), options)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "fuzz.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(found) + b"\n")
    for name, value in found.items():
        print(f"{name}: {value}")
    if options.json:
        print(msgspec.json.encode(found).decode())
    return 0 if all(found["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
