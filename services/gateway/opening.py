"""The gateway's HTTP interface while its front loads."""

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.errors import error_body, error_headers
from shared.contracts.requests import ErrorInfo
from shared.runtime.health import Health, health_app

RETRY_AFTER_S = 5.0
_STARTING = ErrorInfo(
    message="the gateway is starting",
    code="mesh_unavailable",
    status=503,
    retry_after_s=RETRY_AFTER_S,
)


class Opening:
    """
    ASGI application that serves health and metrics, and refuses requests with status 503, until
    the front is set.
    """

    def __init__(self, health: Health) -> None:
        self.application: Any = Starlette(
            routes=[
                *health_app(health).routes,
                Route("/{path:path}", _refuse, methods=["GET", "POST", "DELETE"]),
            ]
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.application(scope, receive, send)


async def _refuse(_request: Request) -> Response:
    return Response(
        error_body(_STARTING),
        status_code=_STARTING.status,
        media_type="application/json",
        headers=error_headers(_STARTING),
    )
