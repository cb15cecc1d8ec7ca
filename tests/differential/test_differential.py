"""
vLLM's own server and the mesh answer equal bodies equally, also if every answer is evicted once.
"""

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from ops.bench.vllm_serve import stock_server
from ops.ports import free_port
from services.agent.backends import registry as backends
from services.engine_core.serve_arguments import serve_arguments
from services.mesh.spec import AgentSpec, MeshSpec
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_MODELS, make_tiny_models
from tests.brokers import RabbitServer, rabbit_targets
from tests.differential.answers import answers, differences, succeeded
from tests.differential.cells import MODEL, asked
from tests.differential.evicting import EvictingEngine, Evictions, RabbitEmbeddedMesh
from tests.differential.models import with_parsers

pytestmark = [
    pytest.mark.rabbitmq,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
]
SEED = 0


@dataclass(frozen=True, slots=True)
class Servers:
    """Clients of both servers."""

    stock: httpx.AsyncClient
    mesh: httpx.AsyncClient
    evictions: Evictions


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Servers]:
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        async with both(url, tmp_path_factory.mktemp("differential")) as running:
            yield running


@asynccontextmanager
async def both(broker: str, directory: Path) -> AsyncIterator[Servers]:
    """`vllm serve`, and a mesh of two engines whose gateway passes bodies on."""
    models = {MODEL: TINY_MODELS[MODEL]}
    registry = with_parsers(
        make_tiny_models(directory / "models", models=models), reasoning_parser="qwen3"
    )
    entry = ModelRegistry.load(registry).entry(MODEL)
    evictions, numbers = Evictions(SEED), count()
    vllm = backends.BACKENDS["vllm"]

    def evicting(*arguments: object) -> EvictingEngine:
        return EvictingEngine(vllm(*arguments), f"engine-{next(numbers)}", evictions)

    spec = MeshSpec(
        broker="embedded",
        registry=registry,
        log_dir=directory / "log",
        gateway_port=free_port(),
        agents=tuple(
            AgentSpec(
                instance_id=f"a{number}",
                engine="vllm",
                settings={"initial_model": MODEL, "pull": {"evict_hold_s": 0.1}},
            )
            for number in range(2)
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends.BACKENDS, "vllm", evicting)
        log = directory / "stock.log"
        async with (
            stock_server(serve_arguments(entry, [MODEL]), log) as stock_serve,
            RabbitEmbeddedMesh(spec, broker) as running,
            running.open_broker("test-observer") as observer,
            httpx.AsyncClient(base_url=stock_serve.url, timeout=120.0) as stock,
            httpx.AsyncClient(base_url=spec.gateway_url, timeout=120.0) as mesh,
        ):
            await evictions.observe(observer)
            yield Servers(stock, mesh, evictions)


async def compare(servers: Servers, number: int) -> None:
    """Compare *number* bodies, print the figures, and fail if more than one percent differs."""
    bodies = asked(SEED, number)
    expected = await answers(servers.stock, bodies)
    undisturbed = await answers(servers.mesh, bodies)
    servers.evictions.active = True
    evicted = await answers(servers.mesh, bodies)
    servers.evictions.active = False
    found = {
        "undisturbed": differences(bodies, expected, undisturbed, draws=False),
        "evicted": differences(bodies, expected, evicted, draws=False),
        "evicted against undisturbed": differences(bodies, undisturbed, evicted, draws=True),
    }
    abandoned = servers.evictions.evicted.keys() - servers.evictions.continued
    figures = {
        "bodies": number,
        "cells": len({body.cell.name for body in bodies}),
        "succeeded on vllm serve": sum(succeeded(answer) for answer in expected),
        "evicted requests": len(servers.evictions.evicted),
        "continued by another engine": len(servers.evictions.continued),
        "cancelled before": len(abandoned),
        "differences": {name: len(each) for name, each in found.items()},
    }
    print(json.dumps(figures))
    for name, each in found.items():
        for body, text in each.items():
            print(f"{name}: {body}: {text[:300]}")
    assert abandoned <= servers.evictions.cancelled
    assert len(abandoned) <= number / 100
    assert len(servers.evictions.evicted) >= number / 4
    assert all(len(each) <= number / 100 for each in found.values()), found


async def test_seeded_bodies_are_answered_as_by_vllms_own_server(servers: Servers):
    """`HEADWAY_DIFFERENTIAL=480` compares bodies of every cell."""
    await compare(servers, int(os.environ.get("HEADWAY_DIFFERENTIAL", "80")))
