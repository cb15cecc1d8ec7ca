"""ASGI application of the console, beside that of the gateway."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from services.gateway.admission import peer_of
from services.gateway.channel import EVENT_STREAM, JSON
from services.gateway.console.access import may_view
from services.gateway.console.frames import FRAMES
from services.gateway.console.letters import letter, letters
from services.gateway.console.lives import late_requests, life
from services.gateway.console.sessions import COOKIE, Sessions
from services.gateway.console.watching import MeshWatch
from services.gateway.errors import error_body, error_headers, error_info
from services.gateway.tenants import Tenants
from shared.broker.protocol import Broker
from shared.contracts.base import Seconds
from shared.contracts.errors import CapacityError, ContractError, MeshError
from shared.runtime.tasks import pause

log = structlog.get_logger()

ROOT = "/console"
STATIC = Path(__file__).parent / "static"
PERIOD_S: Seconds = 1.0
"""Time between two frames."""
MOST_VIEWERS = 64
RETRY_AFTER_S: Seconds = 60.0
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Headers of all answers: the browser loads nothing from other hosts, and no markup of names."""


class WithConsole:
    """
    ASGI application that serves the console itself, and passes all else to *front*.

    Args:
        watch: State of the mesh.
        broker: The broker, for dead letters.
        tenants: Keys.
        sessions: Browsers that have opened the link.
        stop: Set when the gateway stops; streams end then.
        front: Application of everything else.
    """

    def __init__(
        self,
        *,
        watch: MeshWatch,
        broker: Broker,
        tenants: Tenants,
        sessions: Sessions,
        stop: asyncio.Event,
        front: Any,
    ) -> None:
        self._watch = watch
        self._broker = broker
        self._tenants = tenants
        self._sessions = sessions
        self._stop = stop
        self._front = front
        self._own = Starlette(
            routes=[
                Route(ROOT, self._to_page),
                Route(f"{ROOT}/events", self._viewing(self._events)),
                Route(f"{ROOT}/requests", self._viewing(self._late)),
                Route(f"{ROOT}/requests/{{id:path}}", self._viewing(self._life)),
                Route(f"{ROOT}/dead-letters", self._viewing(self._letters)),
                Route(f"{ROOT}/dead-letters/{{id:path}}", self._viewing(self._letter)),
                Mount(ROOT, StaticFiles(directory=STATIC, html=True)),
            ],
            exception_handlers={
                MeshError: _on_error,
                HTTPException: _on_error,
                Exception: _on_error,
            },
        )

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == ROOT or path.startswith(f"{ROOT}/")):
            await self._front(scope, receive, send)
            return

        async def send_with_headers(event: Any) -> None:
            if event["type"] == "http.response.start":
                MutableHeaders(scope=event).update(SECURITY_HEADERS)
            await send(event)

        await self._own(scope, receive, send_with_headers)

    def _viewing(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The handler of a route, after a check of the access."""

        async def checked(request: Request) -> Response:
            may_view(self._tenants, self._sessions, request.headers, peer_of(request.scope))
            response = await handler(request)
            response.headers["cache-control"] = "no-store"
            return response

        return checked

    async def _to_page(self, request: Request) -> Response:
        """Lead to the page; a link with the token gives the browser its cookie."""
        response = RedirectResponse(f"{ROOT}/")
        if (token := request.query_params.get("token")) is not None:
            session = self._sessions.open(token)
            response.set_cookie(COOKIE, session, path=ROOT, httponly=True, samesite="lax")
        return response

    async def _events(self, request: Request) -> Response:
        """Stream the frames of one view as server-sent events."""
        view = request.query_params.get("view", "overview")
        if view not in FRAMES:
            raise ContractError(f"view must be one of {', '.join(FRAMES)}", param="view")
        if self._watch.num_viewers >= MOST_VIEWERS:
            raise CapacityError(
                f"{MOST_VIEWERS} browsers show the console of this gateway, which is the limit",
                retry_after_s=RETRY_AFTER_S,
            )
        return StreamingResponse(
            self._frames(view),
            media_type=EVENT_STREAM,
            headers={"x-accel-buffering": "no"},  # proxies must not buffer events
        )

    async def _frames(self, view: str) -> AsyncIterator[bytes]:
        with self._watch.viewed():
            is_over = False
            while not is_over:
                yield b"data: " + msgspec.json.encode(FRAMES[view](self._watch)) + b"\n\n"
                is_over = await pause(self._stop, PERIOD_S)

    async def _late(self, _request: Request) -> Response:
        return _json(await late_requests(self._broker, self._watch.clock.now()))

    async def _life(self, request: Request) -> Response:
        return _json(await life(self._broker, request.path_params["id"]))

    async def _letters(self, _request: Request) -> Response:
        return _json(await letters(self._broker))

    async def _letter(self, request: Request) -> Response:
        found = await letter(
            self._broker,
            self._tenants,
            request.headers,
            peer_of(request.scope),
            request.path_params["id"],
        )
        return _json(found)


async def _on_error(_request: Request, error: Exception) -> Response:
    info = error_info(error)
    if not isinstance(error, (MeshError, HTTPException)):
        log.error("console.broken", exc_info=error)
    allowed = dict(getattr(error, "headers", None) or {})
    return Response(
        error_body(info),
        status_code=info.status,
        media_type=JSON,
        headers=error_headers(info) | allowed,
    )


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON)
