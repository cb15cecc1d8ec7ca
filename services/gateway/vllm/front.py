"""The gateway's HTTP interface with vLLM's applications. All other routes are closed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.engine_core.models import import_architectures
from services.gateway.errors import error_body, error_headers, error_info
from services.gateway.models import model_list, model_object
from services.gateway.state import Gateway
from services.gateway.vllm.application import model_application
from services.gateway.vllm.door import ROUTES, Door
from shared.contracts.errors import MeshError
from shared.contracts.requests import ErrorInfo
from shared.runtime.health import Health, health_app

log = structlog.get_logger()
JSON = "application/json"


@asynccontextmanager
async def vllm_front(gateway: Gateway, health: Health) -> AsyncIterator[Starlette]:
    """Context with the ASGI application that serves every model of the registry."""
    registry = gateway.registry
    import_architectures(registry.entry(base).architecture for base in registry.bases)
    applications, clients = {}, []
    for base in registry.bases:
        names = [name for name in registry.names if registry.resolve(name).base == base]
        applications[base], client = await model_application(
            registry.entry(base), names, gateway.producer
        )
        clients.append(client)
    log.info("front.ready", models=len(clients))
    try:
        yield _routes(gateway, health, Door(gateway, applications))
    finally:
        for client in clients:
            client.shutdown()


def _routes(gateway: Gateway, health: Health, door: Door) -> Starlette:
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
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            *health_app(health).routes,
        ],
        exception_handlers={MeshError: _on_mesh_error, HTTPException: _on_http_error},
    )


async def _on_mesh_error(_request: Request, error: Exception) -> Response:
    return _error(error_info(error))


async def _on_http_error(_request: Request, error: Exception) -> Response:
    """Answer an unknown path or a wrong method."""
    status = HTTPStatus(getattr(error, "status_code", HTTPStatus.INTERNAL_SERVER_ERROR))
    code = status.phrase.lower().replace(" ", "_")
    return _error(ErrorInfo(message=status.phrase, code=code, status=status))


def _error(info: ErrorInfo) -> Response:
    return Response(
        error_body(info), status_code=info.status, media_type=JSON, headers=error_headers(info)
    )
