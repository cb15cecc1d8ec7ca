"""Health, readiness and metrics of one service, over HTTP and for its own CLI."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shared.contracts.errors import SettingsError
from shared.runtime.http.heads import BoundedHeads

HEALTH, READY, METRICS = "/health", "/ready", "/metrics"
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
KEEP_ALIVE_S = 75
"""
Time that an idle connection stays open between two requests.

The time exceeds the limits of clients and load balancers, usually 60 s, so that these close the
connection first. Otherwise a request may be in transit to a closed connection. A long time is also
needed after a pause of the whole process, when the timer can expire before pending data is read.
"""

DATE_PERIOD_S = 1.0
"""Time after which the date in the heads of answers is written again."""
LAST_REQUESTS_S = 0.05
"""Time in which a server that stops accepts waiting connections, and again reads their requests."""


@dataclass(slots=True, kw_only=True)
class Health:
    """
    Liveness and readiness of a service.

    A service is alive if its process answers, and ready if it can do its work now.
    """

    service: str
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)
    reasons: dict[str, str] = field(default_factory=lambda: {"start": "starting"})
    """Cause -> reason for which the service is not ready; empty if the service is ready."""
    details: Callable[[], dict[str, object]] = dict
    """Further fields of the answer to /health."""

    @property
    def ready(self) -> bool:
        return not self.reasons

    def started(self) -> None:
        """Mark the start-up of the service as complete."""
        self.reasons.pop("start", None)

    def set(self, cause: str, reason: str | None) -> None:
        """Set or clear a reason for which the service is not ready."""
        if reason is None:
            self.reasons.pop(cause, None)
        else:
            self.reasons[cause] = reason


def health_app(health: Health) -> Starlette:
    """ASGI application of /health, /ready and /metrics."""

    async def alive(_request: Request) -> Response:
        return JSONResponse({"status": "ok", "service": health.service} | health.details())

    async def ready(_request: Request) -> Response:
        return JSONResponse(
            {"ready": health.ready, "service": health.service, "reasons": health.reasons},
            status_code=200 if health.ready else 503,
        )

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(health.metrics), media_type=PROMETHEUS_TEXT)

    return Starlette(routes=[Route(HEALTH, alive), Route(READY, ready), Route(METRICS, metrics)])


class QuietServer(uvicorn.Server):
    """
    Runs a uvicorn server inside a service; the service handles signals itself.

    A shutdown answers the requests that clients have sent by then. The kernel resets a connection
    that is closed before it is accepted or before its data is read, and its client cannot see
    whether its request was served.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Begin the shutdown."""
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        # Uvicorn looks ten times per second whether it should stop.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_PERIOD_S):
                    await self._stopped.wait()

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # noqa: ANN201 - uvicorn's own hook
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.sleep(LAST_REQUESTS_S)  # accepts connections that wait at the port
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        await asyncio.sleep(LAST_REQUESTS_S)  # reads the requests of open connections
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)  # waits a while even for none


@contextlib.asynccontextmanager
async def serve_http(
    app: object, *, host: str, port: int, origins: Sequence[str] = ()
) -> AsyncIterator[None]:
    """
    Context in which the ASGI *app* is served.

    Args:
        app: ASGI application.
        host: Address of this machine.
        port: Port.
        origins: Origins whose pages may read what the server itself refuses; `*`: all.

    Raises:
        SettingsError: The address is not available; the message contains the reason.
    """
    sock = _listening(host, port)  # early connections wait instead of being refused
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # any ASGI app
        host=host,
        port=port,
        http=partial(BoundedHeads, origins=origins),  # type: ignore[arg-type]  # makes a protocol
        log_level="error",
        lifespan="off",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        proxy_headers=False,  # the address of a peer decides whether it may name tenants
        timeout_graceful_shutdown=3,
        loop="none",
    )
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[sock]), name=f"http:{port}")
    try:
        yield
    finally:
        server.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        sock.close()


def check_port(host: str, port: int) -> None:
    """
    Check that `serve_http` could listen.

    Raises:
        SettingsError: The address is not available; the message contains the reason.
    """
    _listening(host, port).close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SettingsError(
            f"cannot listen on {host}:{port}: {reason}. Choose another port, or stop the "
            "process that uses this one"
        ) from error
    # Connections inherit the option, which asyncio sets only on sockets that it makes itself: the
    # body of an answer would wait 40 ms for the acknowledgement of its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


@contextlib.asynccontextmanager
async def serve_health(health: Health, *, host: str, port: int) -> AsyncIterator[None]:
    """Context in which *health* is served on its own port; no server if the port is 0."""
    if port == 0:
        yield
        return
    async with serve_http(health_app(health), host=host, port=port):
        yield
