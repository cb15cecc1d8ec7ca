"""ASGI application of stored objects (files, requests, batches), beside that of a front."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qsl
from uuid import uuid4

import msgspec
import structlog
from starlette.exceptions import HTTPException

from services.gateway.admission import Admission, admission
from services.gateway.channel import Channel, UnreadError
from services.gateway.errors import error_info
from services.gateway.headers import REQUEST_ID, headers_in, id_headers
from services.gateway.outcomes import Outcome, outcome_of
from services.gateway.state import Gateway
from shared.contracts.base import TenantId
from shared.contracts.errors import MeshError
from shared.contracts.tenants.keys import Scope

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceCall:
    """One request about stored objects."""

    admission: Admission
    scope: Mapping[str, Any]
    """ASGI scope."""
    headers: Mapping[str, str]
    query: Mapping[str, str]
    object_id: str
    """Second part of the path below the root; empty for the collection."""
    receive: Any
    channel: Channel

    @property
    def tenant(self) -> TenantId:
        return self.admission.tenant

    async def body(self, *, limit: int | None = None) -> bytes:
        """As `Admission.body`."""
        return await self.admission.body(self.receive, limit=limit)

    async def answer(self, body: msgspec.Struct, *, status: int = 200) -> Outcome:
        """Send a JSON object."""
        await self.channel.json(msgspec.json.encode(body), status=status)
        return Outcome.COMPLETED


Handler = Callable[[ResourceCall], Awaitable[Outcome]]
Routes = Mapping[str, Mapping[str, Handler]]
"""
Path below the root, with `{id}` for the object's id -> method -> handler: `""` is the collection,
`"{id}"` an object, `"{id}/cancel"` a part of it or an action on it. Without `""`, the collection
belongs to the front.
"""


class Resource(Protocol):
    """A kind of stored objects."""

    @property
    def root(self) -> str:
        """Path of the collection, e.g. `/v1/files`."""
        ...

    @property
    def name(self) -> str:
        """Label of metrics and logs."""
        ...

    @property
    def scope(self) -> Scope:
        """What a key must allow."""
        ...

    @property
    def routes(self) -> Routes: ...


class WithResources:
    """
    ASGI application that serves stored objects itself, and passes all else to *front*.

    Args:
        gateway: Components that all requests share.
        resources: Kinds of stored objects.
        front: Application of the front.
    """

    def __init__(self, gateway: Gateway, resources: Sequence[Resource], front: Any) -> None:
        self._gateway = gateway
        self._resources = tuple(resources)
        self._front = front

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one request."""
        path = scope.get("path", "")
        resource = self._resource(path) if scope["type"] == "http" else None
        if resource is None:
            await self._front(scope, receive, send)
            return
        headers = headers_in(scope)
        request_id = f"req-{uuid4().hex}"
        channel = Channel(
            send,
            id_headers(request_id, headers.get(REQUEST_ID)),
            unread_s=self._gateway.settings.request_timeout_s,
        )
        logged = log.bind(request_id=request_id, endpoint=resource.name)
        outcome = Outcome.CANCELLED
        try:
            outcome = await self._answered(resource, scope, receive, headers, channel)
        except UnreadError as error:
            # The missing rest makes the server close the connection.
            logged.info("request.unread", error=str(error))
        except (MeshError, HTTPException) as error:
            info = error_info(error)
            outcome = outcome_of(info)
            logged.info("request.refused", code=info.code, status=info.status, error=str(error))
            if channel.started:
                # The missing rest makes the server close the connection.
                return
            found = error.headers if isinstance(error, HTTPException) else None
            await channel.error(info, headers=None if found is None else dict(found))
        except Exception as error:  # a bug: the client gets an answer, the log the rest
            outcome = Outcome.FAILED
            logged.exception("request.broken")
            if channel.started:
                raise
            await channel.error(error_info(error))
        finally:
            self._gateway.metrics.requests.labels(resource.name, outcome.value).inc()

    def _resource(self, path: str) -> Resource | None:
        return next(
            (
                each
                for each in self._resources
                if (path == each.root and "" in each.routes) or path.startswith(f"{each.root}/")
            ),
            None,
        )

    async def _answered(
        self,
        resource: Resource,
        scope: dict[str, Any],
        receive: Any,
        headers: Mapping[str, str],
        channel: Channel,
    ) -> Outcome:
        with admission(self._gateway, scope, needs=resource.scope) as admitted:
            object_id, handler = _route(resource, scope["path"], scope["method"])
            query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
            return await handler(
                ResourceCall(
                    admission=admitted,
                    scope=scope,
                    headers=headers,
                    query=query,
                    object_id=object_id,
                    receive=receive,
                    channel=channel,
                )
            )


def _route(resource: Resource, path: str, method: str) -> tuple[str, Handler]:
    """
    The object's id in *path*, and the handler of *method*.

    Raises:
        HTTPException: There is none (status 404, or 405 with another method).
    """
    below = path.removeprefix(resource.root).strip("/")
    object_id, _, rest = below.partition("/")
    pattern = "/".join(each for each in ("{id}" if object_id else "", rest) if each)
    methods = resource.routes.get(pattern)
    if methods is None:
        raise HTTPException(HTTPStatus.NOT_FOUND)
    handler = methods.get(method)
    if handler is None:
        allowed = {"allow": ", ".join(methods)}
        raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers=allowed)
    return object_id, handler
