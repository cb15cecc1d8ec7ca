"""Requests without a limit of their answer leave as much room as requests with a short limit."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from ops.ports import free_port
from services.mesh.embedded import EmbeddedMesh
from services.mesh.spec import EMBEDDED, AgentSpec, MeshSpec
from shared.contracts.ingress import InferenceRequest
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import make_tiny_models
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock
from tests.queued import MODEL

CONTEXT = 32_768
NUM_REQUESTS = 64
ENGINE = {"kv_capacity_tokens": 65_536, "mean_output_tokens": 60, "cold_activation_s": 0.1}


def registry(directory: Path) -> Path:
    """A registry whose model has a long context."""
    entry = ModelRegistry.load(make_tiny_models(directory, weights=False)).entry(MODEL)
    path = directory / "long.json"
    write_registry(path, [msgspec.structs.replace(entry, max_model_len=CONTEXT)])
    return path


async def concurrency(directory: Path, limit: int) -> int:
    """Largest number of requests that the engine ran at the same time."""
    spec = MeshSpec(
        broker=EMBEDDED,
        registry=registry(directory / "models"),
        log_dir=directory / "log",
        gateway_port=free_port(),
        agents=(
            AgentSpec(
                instance_id="a",
                settings={"engine": {"simulated": ENGINE}, "initial_model": MODEL},
            ),
        ),
    )
    async with (
        EmbeddedMesh(spec) as mesh,
        mesh.open_broker("producer") as broker,
        Producer(broker, name="test", clock=SystemClock()) as producer,
        asyncio.timeout(120),
    ):
        bodies = [
            InferenceRequest(model=MODEL, prompt=(20 + n, 21, 22), max_tokens=limit, seed=n)
            for n in range(NUM_REQUESTS)
        ]
        generations = [await producer.submit(body, reply=ReplyMode.FINAL) for body in bodies]
        finals = [await generation.final() for generation in generations]
    assert all(isinstance(final, RequestCompleted) for final in finals)
    spans = [(final.timings.submitted_at, final.timings.finished_at) for final in finals]
    return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)


@pytest.mark.slow
async def test_open_answers_run_as_concurrently_as_short_ones(tmp_path: Path) -> None:
    """With room for limits, two open answers would fill the engine."""
    short = await concurrency(tmp_path / "short", 128)
    open_ = await concurrency(tmp_path / "open", CONTEXT - 3)
    print(f"concurrency with a limit of 128: {short}, with the whole context: {open_}")

    assert open_ >= 0.9 * short
    assert short > 20
