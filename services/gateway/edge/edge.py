"""ASGI application around all others: keeps streams alive, and completes answers at the end."""

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog
from starlette.middleware.cors import CORSMiddleware

from services.gateway.edge.announced import expect_announcements
from services.gateway.edge.answer import Answer
from services.gateway.edge.forms import form_of
from services.gateway.errors import error_info
from shared.contracts.base import Seconds
from shared.contracts.requests import ErrorInfo

log = structlog.get_logger()
LAST_ANSWERS_S: Seconds = 5.0
"""Longest time for the answers of requests that are open when the gateway stops."""
STOPPED = ErrorInfo(
    message="the gateway stops; send the request again",
    code="mesh_unavailable",
    status=503,
    retry_after_s=5.0,
)
_METHODS = ("GET", "POST", "DELETE")
_EXPOSED = (
    *("x-headway-request-id", "x-request-id", "retry-after"),
    *("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests"),
    *("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens"),
)
"""Headers of answers that pages of other origins may read."""


class Edge:
    """
    ASGI application that passes requests to *application*.

    Args:
        application: Answers all requests.
        keep_alive_s: Longest time without a byte of an event stream; 0: no limit.
    """

    def __init__(self, application: Any, *, keep_alive_s: Seconds) -> None:
        self._application = application
        self._keep_alive_s = keep_alive_s
        self._open: set[asyncio.Task[Any]] = set()
        """Tasks of the requests in progress."""
        self._is_stopped = False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._application(scope, receive, send)
            return
        announced = expect_announcements(scope)
        answer = Answer(send, announced, form_of(scope["path"]), self._keep_alive_s)
        self._open.add(task)
        try:
            await self._application(scope, receive, answer.send)
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
            task.uncancel()
            await answer.fail(STOPPED)
        except Exception as error:  # a bug: the client gets an answer, the log the rest
            log.exception("request.broken", path=scope["path"])
            await answer.fail(error_info(error))
        finally:
            self._open.discard(task)
            answer.close()

    async def stop(self) -> None:
        """End the requests in progress with an error, so that their clients ask again."""
        self._is_stopped = True
        ending = set(self._open)
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=LAST_ANSWERS_S)


def with_cors(application: Any, origins: Sequence[str]) -> Any:
    """
    *application* for pages of *origins* (`*`: all), whose browsers ask before a request and read
    its answer only if it names them.
    """
    if not origins:
        return application
    return CORSMiddleware(
        application,
        allow_origins=origins,
        allow_methods=_METHODS,
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )
