"""ASGI layer that makes a span of each HTTP request for an answer."""

from typing import Any

from services.gateway.door import ROUTES
from services.gateway.headers import MESH_REQUEST_ID
from shared.tracing.attributes import Attribute
from shared.tracing.context import TRACEPARENT, TRACESTATE, TraceContext
from shared.tracing.spans import Kind, Span, Tracer

_HEADERS = (TRACEPARENT.encode(), TRACESTATE.encode())
_REQUEST_ID = MESH_REQUEST_ID.encode()
_SERVER_ERROR = 500


class Traced:
    """
    ASGI application that passes requests to *application* with the contexts of their spans.

    Args:
        application: Answers all requests.
        tracer: Makes the spans; a context that the client sends is the parent's.
    """

    def __init__(self, application: Any, tracer: Tracer) -> None:
        self._application = application
        self._tracer = tracer

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        route = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "POST" or route not in ROUTES:
            await self._application(scope, receive, send)
            return
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in _HEADERS
        }
        with self._tracer.span(f"POST {route}", headers, Kind.SERVER) as span:
            span.add({Attribute.HTTP_METHOD: "POST", Attribute.HTTP_ROUTE: route})

            async def respond(event: dict[str, Any]) -> None:
                if event["type"] == "http.response.start":
                    _add_response(span, event)
                await send(event)

            await self._application(_with_context(scope, span.context), receive, respond)


def _add_response(span: Span, start: dict[str, Any]) -> None:
    """Set the attributes of a response that starts."""
    status = start["status"]
    span.add({Attribute.HTTP_STATUS: status})
    for name, value in start.get("headers", ()):
        if name == _REQUEST_ID:
            span.add({Attribute.REQUEST_ID: value.decode("latin-1")})
    if status >= _SERVER_ERROR:
        span.fail(str(status))


def _with_context(scope: dict[str, Any], context: TraceContext) -> dict[str, Any]:
    """A copy of *scope* whose headers have *context* instead of the client's."""
    kept = [each for each in scope["headers"] if each[0] not in _HEADERS]
    own = [(name.encode(), value.encode()) for name, value in context.headers.items()]
    return {**scope, "headers": [*kept, *own]}
