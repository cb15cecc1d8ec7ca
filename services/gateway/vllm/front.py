"""
The gateway's HTTP interface with vLLM's applications, for the routes of the table `ROUTES`.

Other routes of vLLM's application are not available.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from vllm.config import VllmConfig

from services.engine_core.application import TASKS, model_application
from services.engine_core.engine_client import Fail
from services.engine_core.models import import_architectures
from services.engine_core.serve_arguments import serve_arguments
from services.gateway.errors import error_body, error_headers, error_info
from services.gateway.models import model_list, model_object
from services.gateway.state import Gateway
from services.gateway.vllm.core_client import MeshCoreClient, vector_width
from services.gateway.vllm.door import ROUTES, Door
from services.gateway.vllm.openapi import openapi_document
from shared.contracts.base import ModelName
from shared.contracts.errors import MeshError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import ErrorInfo
from shared.models.digest import model_digest
from shared.runtime.health import Health, health_app

log = structlog.get_logger()
JSON = "application/json"


Add = Callable[[ModelEntry], Awaitable[None]]


@asynccontextmanager
async def vllm_front(
    gateway: Gateway, health: Health
) -> AsyncIterator[tuple[Starlette, Add, Mapping[ModelName, str]]]:
    """
    Context with the ASGI application that serves every model of the registry, a function that
    prepares it for a model that is about to be added to the registry, and the models' digests.
    """
    registry = gateway.registry
    applications: dict[ModelName, Any] = {}
    digests: dict[ModelName, str] = {}
    clients = []

    async def add(entry: ModelEntry) -> None:
        # In a thread, since the import of a model class takes seconds.
        await asyncio.to_thread(import_architectures, [entry.architecture])
        digest = digests[entry.name] = await asyncio.to_thread(model_digest, entry)
        tasks = TASKS[entry.task]

        def core(config: VllmConfig, fail: Fail) -> MeshCoreClient:
            width = vector_width(config.model_config)
            return MeshCoreClient(
                gateway.producer, tasks=tasks, digest=digest, width=width, fail=fail
            )

        arguments = serve_arguments(entry, entry.names)
        application, client = await model_application(arguments, tasks, core)
        clients.append(client)
        applications[entry.name] = application
        document.cache_clear()

    @cache
    def document() -> bytes:
        return _openapi(applications)

    for base in registry.bases:
        await add(registry.entry(base))
    log.info("front.ready", models=len(clients))
    try:
        yield _routes(gateway, health, Door(gateway, applications), document), add, digests
    finally:
        for client in clients:
            client.shutdown()


def _openapi(applications: Mapping[ModelName, Any]) -> bytes:
    """The OpenAPI document of the routes that at least one model has."""
    document = openapi_document(applications.values(), ROUTES) if applications else {}
    return msgspec.json.encode(document)


def _routes(
    gateway: Gateway, health: Health, door: Door, document: Callable[[], bytes]
) -> Starlette:
    async def openapi(_request: Request) -> Response:
        # The first call takes a second.
        return Response(await asyncio.to_thread(document), media_type=JSON)

    async def models(request: Request) -> Response:
        gateway.tenants.authenticate(request.headers.get("authorization"))
        return Response(msgspec.json.encode(model_list(gateway.registry)), media_type=JSON)

    async def model(request: Request) -> Response:
        gateway.tenants.authenticate(request.headers.get("authorization"))
        found = model_object(gateway.registry, request.path_params["name"])
        return Response(msgspec.json.encode(found), media_type=JSON)

    return Starlette(
        routes=[
            *(Route(path, door, methods=["POST"]) for path in ROUTES),
            Route("/openapi.json", openapi),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            *health_app(health).routes,
        ],
        exception_handlers={MeshError: _on_mesh_error, HTTPException: _on_http_error},
    )


async def _on_mesh_error(_request: Request, error: Exception) -> Response:
    return _error(error_info(error))


async def _on_http_error(_request: Request, error: Exception) -> Response:
    """Answer a request with an unknown path or a wrong method."""
    status = HTTPStatus(getattr(error, "status_code", HTTPStatus.INTERNAL_SERVER_ERROR))
    code = status.phrase.lower().replace(" ", "_")
    return _error(ErrorInfo(message=status.phrase, code=code, status=status))


def _error(info: ErrorInfo) -> Response:
    return Response(
        error_body(info), status_code=info.status, media_type=JSON, headers=error_headers(info)
    )
