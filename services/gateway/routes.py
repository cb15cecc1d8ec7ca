"""Routes of the HTTP interface."""

from http import HTTPStatus

import structlog
from litestar import Litestar, Response, asgi, get, post
from litestar.connection import Request
from litestar.datastructures import State
from litestar.params import FromPath
from litestar.types import ASGIApp, Receive, Scope, Send

from services.gateway.admission import authorization, peer_of
from services.gateway.channel import JSON
from services.gateway.errors import INTERNAL_ERROR, error_body, error_headers, error_info
from services.gateway.exchange import Exchange
from services.gateway.models import ModelList, ModelObject, model_list, model_object
from services.gateway.shapes import CHAT, COMPLETIONS, Endpoint
from services.gateway.state import Gateway
from services.gateway.stories import STORIES, stories, story
from services.gateway.usage import usage
from shared.runtime.health import HEALTH, METRICS, READY, Health, health_app

log = structlog.get_logger()

AnyRequest = Request[object, object, State]


TEXT_ENDPOINTS = (CHAT.path, COMPLETIONS.path)
"""Endpoints of this application that generate answers."""
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
"""Other paths of a gateway, beside those of resources."""


def build_app(gateway: Gateway, health: Health) -> Litestar:
    """The ASGI application of a gateway."""

    @post(TEXT_ENDPOINTS[0])
    async def chat(request: AnyRequest) -> ASGIApp:
        return _exchange(gateway, CHAT, request)

    @post(TEXT_ENDPOINTS[1])
    async def completions(request: AnyRequest) -> ASGIApp:
        return _exchange(gateway, COMPLETIONS, request)

    @get("/v1/models")
    async def models(request: AnyRequest) -> ModelList:
        _authenticate(gateway, request)
        return model_list(gateway.instances)

    @get("/v1/models/{name:path}")
    async def model(request: AnyRequest, name: FromPath[str]) -> ModelObject:
        # The parameter has the type `path`, since model names may contain slashes.
        _authenticate(gateway, request)
        return model_object(gateway.instances, str(name).removeprefix("/"))

    @get("/v1/usage")
    async def tenant_usage(request: AnyRequest) -> Response[bytes]:
        headers, peer = dict(request.headers.items()), peer_of(request.scope)
        found = await usage(gateway, headers, peer, dict(request.query_params))
        return Response(found, media_type=JSON)

    @get(STORIES)
    async def recent_stories(request: AnyRequest) -> Response[bytes]:
        headers, peer = dict(request.headers.items()), peer_of(request.scope)
        found = await stories(gateway, headers, peer, dict(request.query_params))
        return Response(found, media_type=JSON)

    @get(f"{STORIES}/{{request_id:path}}")
    async def one_story(request: AnyRequest, request_id: FromPath[str]) -> Response[bytes]:
        # The parameter has the type `path`, since ids may contain slashes.
        headers, peer = dict(request.headers.items()), peer_of(request.scope)
        name = str(request_id).removeprefix("/")
        found = await story(gateway, headers, peer, dict(request.query_params), name)
        return Response(found, media_type=JSON)

    own_health = asgi([HEALTH, READY, METRICS], copy_scope=True)(health_app(health))
    return Litestar(
        route_handlers=[
            *(chat, completions, models, model, tenant_usage, recent_stories, one_story),
            own_health,
        ],
        openapi_config=None,
        # Otherwise Litestar would configure the process's root logger.
        logging_config=None,
        exception_handlers={Exception: _on_error},
    )


def _authenticate(gateway: Gateway, request: AnyRequest) -> None:
    headers = dict(request.headers.items())
    gateway.tenants.authenticate(
        authorization(headers), headers=headers, peer=peer_of(request.scope), scope=None
    )


def _exchange(gateway: Gateway, endpoint: Endpoint, request: AnyRequest) -> ASGIApp:
    """ASGI application for one HTTP request; a single coroutine reads, waits and answers."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await Exchange(gateway, endpoint, request.scope, request.receive).run(send)

    return app


def _on_error(request: AnyRequest, error: Exception) -> Response[bytes]:
    """
    Answer errors that occur before a request is processed: unknown path or model, wrong method,
    missing key.
    """
    info = error_info(error)
    headers = error_headers(info)
    if info.code == INTERNAL_ERROR:
        log.error("request.broken", exc_info=error)
    if info.status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["allow"] = "POST" if request.url.path in TEXT_ENDPOINTS else "GET"
    return Response(
        error_body(info),
        status_code=info.status,
        media_type=JSON,
        headers=headers,
    )
