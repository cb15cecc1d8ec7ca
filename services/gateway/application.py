"""The HTTP application of a gateway."""

from collections.abc import Mapping
from functools import cache
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.admission import authorization, peer_of
from services.gateway.door import ROUTES, Door
from services.gateway.errors import error_body, error_headers, error_info
from services.gateway.models import model_list, model_object
from services.gateway.openapi_document import openapi_document
from services.gateway.state import Gateway
from services.gateway.stories import STORIES, stories, story
from services.gateway.usage import usage
from shared.contracts.errors import MeshError
from shared.contracts.requests import ErrorInfo
from shared.runtime.health import HEALTH, METRICS, READY, Health, health_app

JSON = "application/json"
OWN_PATHS = (
    "/v1/models",
    "/v1/usage",
    STORIES,
    HEALTH,
    READY,
    METRICS,
    "/console",
    "/openapi.json",
)
"""Paths of a gateway beside those of `ROUTES` and of resources."""


def application_of(gateway: Gateway, health: Health) -> Starlette:
    """
    The ASGI application of a gateway.

    Args:
        gateway: Components that all requests share.
        health: State of the gateway.
    """
    door = Door(gateway)

    async def openapi(_request: Request) -> Response:
        return Response(_document(), media_type=JSON)

    def authenticate(request: Request) -> None:
        headers = dict(request.headers)
        gateway.tenants.authenticate(
            authorization(headers), headers=headers, peer=peer_of(request.scope), scope=None
        )

    async def tenant_usage(request: Request) -> Response:
        headers, peer = dict(request.headers), peer_of(request.scope)
        found = await usage(gateway, headers, peer, dict(request.query_params))
        return Response(found, media_type=JSON)

    async def recent_stories(request: Request) -> Response:
        headers, peer = dict(request.headers), peer_of(request.scope)
        found = await stories(gateway, headers, peer, dict(request.query_params))
        return Response(found, media_type=JSON)

    async def one_story(request: Request) -> Response:
        headers, peer = dict(request.headers), peer_of(request.scope)
        name = request.path_params["request_id"]
        found = await story(gateway, headers, peer, dict(request.query_params), name)
        return Response(found, media_type=JSON)

    async def models(request: Request) -> Response:
        authenticate(request)
        return Response(msgspec.json.encode(model_list(gateway.instances)), media_type=JSON)

    async def model(request: Request) -> Response:
        authenticate(request)
        found = model_object(gateway.instances, request.path_params["name"])
        return Response(msgspec.json.encode(found), media_type=JSON)

    return Starlette(
        routes=[
            *(Route(path, door, methods=["POST"]) for path in ROUTES),
            Route("/openapi.json", openapi),
            Route("/v1/models", models),
            Route("/v1/usage", tenant_usage),
            Route(STORIES, recent_stories),
            Route(f"{STORIES}/{{request_id:path}}", one_story),
            Route("/v1/models/{name:path}", model),
            *health_app(health).routes,
        ],
        exception_handlers={MeshError: _on_mesh_error, HTTPException: _on_http_error},
    )


@cache
def _document() -> bytes:
    """The OpenAPI document, which anyone may ask for again and again."""
    return msgspec.json.encode(openapi_document(ROUTES))


async def _on_mesh_error(_request: Request, error: Exception) -> Response:
    return _error(error_info(error))


async def _on_http_error(_request: Request, error: Exception) -> Response:
    """Answer a request with an unknown path or a wrong method."""
    status = HTTPStatus(getattr(error, "status_code", HTTPStatus.INTERNAL_SERVER_ERROR))
    code = status.phrase.lower().replace(" ", "_")
    allowed = getattr(error, "headers", None)
    return _error(ErrorInfo(message=status.phrase, code=code, status=status), allowed)


def _error(info: ErrorInfo, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        error_body(info),
        status_code=info.status,
        media_type=JSON,
        headers=error_headers(info) | dict(headers or {}),
    )
