"""
The gateway's HTTP interface with vLLM's applications, for the routes of the table `ROUTES`.

Other routes of vLLM's application are not available.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from starlette.applications import Starlette
from vllm.config import VllmConfig

from services.engine_core.application import TASKS, model_application
from services.engine_core.engine_client import EngineClient, Fail
from services.engine_core.media import ImageReads, current_reads
from services.engine_core.models import import_architectures
from services.engine_core.pooling import vector_width
from services.engine_core.serve_arguments import serve_arguments
from services.gateway.application import application_of
from services.gateway.door import ROUTES, Door
from services.gateway.pass_through import PassThrough
from services.gateway.state import Gateway
from services.gateway.vllm.core_client import MeshCoreClient
from services.gateway.vllm.openapi import openapi_document
from shared.contracts.base import ModelName, UnixTime
from shared.contracts.models import ModelEntry
from shared.models.digest import model_digest
from shared.runtime.health import Health

log = structlog.get_logger()


CLIENT_REST_S = 60.0
"""Time after which the engine client of a removed model is closed, if no request uses it."""


_Client = tuple[EngineClient, MeshCoreClient]


class Applications:
    """
    vLLM's application of each model, as the registry changes.

    Args:
        gateway: Components that all requests share.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.by_model: dict[ModelName, Any] = {}
        self.digests: dict[ModelName, str] = {}
        self._clients: dict[ModelName, _Client] = {}
        self._left: list[tuple[UnixTime, _Client]] = []
        """Times at which clients were replaced or removed; requests in progress may use them."""
        self._document: bytes | None = None

    async def add(self, entry: ModelEntry) -> None:
        """Make the application of a model."""
        if entry.takes_bodies:
            self.by_model[entry.name] = PassThrough(self._gateway.producer)
            return
        # In a thread, since the import of a model class takes seconds.
        await asyncio.to_thread(import_architectures, [entry.architecture])
        digest = await asyncio.to_thread(model_digest, entry)
        tasks = TASKS[entry.task]

        cores = []

        def core(config: VllmConfig, fail: Fail) -> MeshCoreClient:
            width = vector_width(config.model_config)
            made = MeshCoreClient(
                self._gateway.producer, tasks=tasks, digest=digest, width=width, fail=fail
            )
            cores.append(made)
            return made

        arguments = serve_arguments(entry, entry.names)
        application, client = await model_application(arguments, tasks, core)
        self._leave(entry.name)
        self.by_model[entry.name] = application
        self.digests[entry.name] = digest
        self._clients[entry.name] = client, cores[0]
        self._document = None

    async def replace(self, entry: ModelEntry) -> None:
        """Make the application of a model again, with other names."""
        await self.add(entry)

    async def remove(self, model: ModelName) -> None:
        """Remove the application of a model; requests in progress still use it."""
        self._leave(model)
        self.by_model.pop(model, None)
        self.digests.pop(model, None)
        self._document = None

    def most_chars(self, model: ModelName) -> float:
        """Number of characters of which the model's context may consist; infinite for servers."""
        if model not in self._clients:
            return math.inf
        tokenizer = self._clients[model][0].renderer.get_tokenizer()
        entry = self._gateway.registry.entry(model)
        return entry.max_model_len * float(tokenizer.max_chars_per_token)

    def document(self) -> bytes:
        """The OpenAPI document of the routes that at least one model has; blocks for a second."""
        if self._document is None:
            of_vllm = [self.by_model[model] for model in self._clients]
            found = openapi_document(of_vllm, ROUTES) if of_vllm else {}
            self._document = msgspec.json.encode(found)
        return self._document

    def close(self) -> None:
        """Stop all engine clients."""
        for client, _ in (*self._clients.values(), *(left for _, left in self._left)):
            client.shutdown()

    def _leave(self, model: ModelName) -> None:
        now = self._gateway.clock.now()
        if (client := self._clients.pop(model, None)) is not None:
            self._left.append((now, client))
        rested = [item for item in self._left if item[0] < now - CLIENT_REST_S]
        for item in rested:
            client, core = item[1]
            if core.is_idle:
                client.shutdown()
                self._left.remove(item)


@asynccontextmanager
async def vllm_front(
    gateway: Gateway, health: Health
) -> AsyncIterator[tuple[Starlette, Applications, Mapping[ModelName, str]]]:
    """
    Context with the ASGI application that serves every model of the registry, what it does about
    changes of the registry, and the models' digests.
    """
    applications, registry = Applications(gateway), gateway.registry

    def read_images(model: ModelName) -> None:
        own = registry.entry(model).allowed_media_hosts
        hosts = {host.lower() for host in (*gateway.settings.allowed_media_hosts, *own)}
        current_reads.set(ImageReads(gateway.settings.images, hosts))

    for base in registry.bases:
        await applications.add(registry.entry(base))
    log.info("front.ready", models=len(applications.by_model))
    door = Door(gateway, applications.by_model, read_images, applications.most_chars)
    try:
        yield (
            application_of(gateway, health, door, applications.document),
            applications,
            applications.digests,
        )
    finally:
        applications.close()
