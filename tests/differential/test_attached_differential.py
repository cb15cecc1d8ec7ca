"""A mesh in front of `vllm serve` answers equal bodies as the server itself does."""

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from ops.bench.vllm_serve import stock_server
from ops.ports import free_port
from services.engine_core.serve_arguments import serve_arguments
from services.mesh.processes import ProcessMesh
from services.mesh.spec import AgentSpec, MeshSpec
from shared.contracts.models import Form, ModelEntry
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import TINY_MODELS, make_tiny_models
from tests.brokers import RabbitServer, rabbit_targets
from tests.differential.answers import answers, differences
from tests.differential.cells import MODEL, asked
from tests.differential.models import with_parsers

pytestmark = [pytest.mark.rabbitmq, pytest.mark.vllm, pytest.mark.slow]
LEAST_EQUAL = 0.97


@dataclass(frozen=True, slots=True)
class Clients:
    """Clients of the server itself, and of the mesh in front of it."""

    server: httpx.AsyncClient
    mesh: httpx.AsyncClient


FLAGS: dict[Form, tuple[str, ...]] = {"bodies": (), "tokens": ("--enable-scale-out",)}
"""Flags of the server."""


@asynccontextmanager
async def both(broker: str, directory: Path, form: Form) -> AsyncIterator[Clients]:
    """Clients of `vllm serve`, and of a mesh in front of it."""
    models = {MODEL: TINY_MODELS[MODEL]}
    files = make_tiny_models(directory / "models", models=models)
    entry = ModelRegistry.load(with_parsers(files, reasoning_parser="qwen3")).entry(MODEL)
    registry = directory / "attached.json"
    taken = ModelEntry(name=MODEL, takes="bodies", max_model_len=entry.max_model_len)
    write_registry(registry, [entry if form == "tokens" else taken])
    log = directory / "vllm-serve.log"
    async with stock_server((*serve_arguments(entry, [MODEL]), *FLAGS[form]), log) as server:
        remote = {"models": [MODEL], "engine": {"remote": {"url": server.url}}}
        spec = MeshSpec(
            broker=broker,
            registry=registry,
            log_dir=directory / "log",
            gateway_port=free_port(),
            agents=(AgentSpec(instance_id="attached", engine="remote", settings=remote),),
        )
        async with (
            ProcessMesh(spec),
            httpx.AsyncClient(base_url=server.url, timeout=120.0) as direct,
            httpx.AsyncClient(base_url=spec.gateway_url, timeout=120.0) as mesh,
        ):
            yield Clients(direct, mesh)


@pytest.mark.parametrize("form", ["bodies", "tokens"])
async def test_seeded_bodies_are_answered_as_by_the_server(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path: Path, form: Form
) -> None:
    """`HEADWAY_DIFFERENTIAL=480` compares bodies of every cell."""
    number = int(os.environ.get("HEADWAY_DIFFERENTIAL", "80"))
    bodies = asked(0, number)
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as broker:
        async with both(broker, tmp_path, form) as clients:
            expected = await answers(clients.server, bodies)
            found = await answers(clients.mesh, bodies)
    different = differences(bodies, expected, found, draws=False)
    print(json.dumps({"form": form, "bodies": number, "different": len(different)}))
    for body, text in different.items():
        print(f"{body}: {text[:300]}")

    assert len(different) <= number * (1 - LEAST_EQUAL)
