"""Health, readiness and metrics of one service, over HTTP and for its own CLI."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import uvicorn
from litestar import Litestar, Response, get
from prometheus_client import CollectorRegistry, generate_latest

from shared.contracts.errors import SettingsError

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
KEEP_ALIVE_S = 75
"""
How long a connection stays open between two requests.

Longer than clients and load balancers keep theirs, which is 60 s at most as a rule: who closes
first must be who sends the next request, or that may be on its way to a connection that is gone.
After a pause of the whole process the timer also runs out before what has come is read.
"""


@dataclass(slots=True, kw_only=True)
class Health:
    """
    What a service says about itself.

    Alive means the process answers; ready means that it can do its work now.
    """

    service: str
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    reasons: dict[str, str] = field(default_factory=lambda: {"start": "starting"})
    """Why it is not ready, by cause; ready when empty."""

    @property
    def ready(self) -> bool:
        return not self.reasons

    def started(self) -> None:
        """Start-up is over."""
        self.reasons.pop("start", None)

    def set(self, cause: str, reason: str | None) -> None:
        """Record or clear a reason for not being ready."""
        if reason is None:
            self.reasons.pop(cause, None)
        else:
            self.reasons[cause] = reason


def health_routes(health: Health) -> list[object]:
    """Litestar handlers of /health, /ready and /metrics."""

    @get("/health", sync_to_thread=False)
    def alive() -> dict[str, str]:
        return {"status": "ok", "service": health.service}

    @get("/ready", sync_to_thread=False)
    def ready() -> Response[dict[str, object]]:
        return Response(
            {"ready": health.ready, "service": health.service, "reasons": health.reasons},
            status_code=200 if health.ready else 503,
        )

    @get("/metrics", sync_to_thread=False, media_type=PROMETHEUS_TEXT)
    def metrics() -> bytes:
        return generate_latest(health.metrics)

    return [alive, ready, metrics]


class QuietServer(uvicorn.Server):
    """uvicorn inside a service that owns the signals."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # noqa: ANN201 - uvicorn's own hook
        yield


@contextlib.asynccontextmanager
async def serve_http(app: object, *, host: str, port: int) -> AsyncIterator[None]:
    """
    Serve an ASGI *app* while the context is open.

    Raises:
        SettingsError: Nothing can listen there; the message says why.
    """
    sock = _listening(host, port)  # who connects before the server is up waits, unrefused
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # any ASGI app
        host=host,
        port=port,
        log_level="error",
        lifespan="off",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=3,
        loop="none",
    )
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[sock]), name=f"http:{port}")
    try:
        yield
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await task
        sock.close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SettingsError(
            f"cannot listen on {host}:{port}: {reason}. Set another port, or end what uses this one"
        ) from error


@contextlib.asynccontextmanager
async def serve_health(health: Health, *, host: str, port: int) -> AsyncIterator[None]:
    """Serve *health* on its own port while the context is open; port 0 serves nothing."""
    if port == 0:
        yield
        return
    app = Litestar(route_handlers=health_routes(health), openapi_config=None, logging_config=None)  # type: ignore[arg-type]
    async with serve_http(app, host=host, port=port):
        yield
