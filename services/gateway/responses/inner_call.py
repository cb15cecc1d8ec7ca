"""A request of the gateway to its own front, answered within the process."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from services.gateway.admission import INTERNAL, Internal
from shared.api.events import EventSplitter, data_of
from shared.contracts.base import TenantId

log = structlog.get_logger()

MAX_PARTS = 64
"""Number of parts of an answer that wait to be read; the front then waits."""
EVENT_STREAM = "text/event-stream"


@dataclass
class InnerAnswer:
    """The answer of the front."""

    body: bytes
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    _begun: asyncio.Event = field(default_factory=asyncio.Event)
    _parts: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MAX_PARTS))
    _asked: bool = False

    @property
    def is_stream(self) -> bool:
        """True if the body is a stream of events."""
        return self.headers.get("content-type", "").startswith(EVENT_STREAM)

    async def begin(self) -> None:
        """Wait for the status; it is 0 if the front ended without an answer."""
        await self._begun.wait()

    async def whole(self) -> bytes:
        """The whole body."""
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while (part := await self._parts.get()) is not None:
            yield part

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of a stream of events; other data is left out."""
        splitter = EventSplitter()
        async for part in self.parts():
            for event in splitter.push(part):
                if (found := _object_of(event)) is not None:
                    yield found

    async def receive(self) -> dict[str, Any]:
        """The `receive` of the front: the body, and no disconnection."""
        if self._asked:
            await asyncio.Event().wait()
        self._asked = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, event: Mapping[str, Any]) -> None:
        """The `send` of the front."""
        if event["type"] == "http.response.start":
            self.status = event["status"]
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in event["headers"]
            }
            self._begun.set()
        elif event["type"] == "http.response.body" and event.get("body"):
            await self._parts.put(event["body"])

    async def end(self) -> None:
        """Note that the front has returned."""
        self._begun.set()
        await self._parts.put(None)


@asynccontextmanager
async def inner_call(
    front: Any, *, path: str, body: bytes, headers: Mapping[str, str], tenant: TenantId
) -> AsyncIterator[InnerAnswer]:
    """
    Context of a POST request of *tenant*; leaving it ends the request as a disconnection does.

    Args:
        front: ASGI application of the front.
        path: Path of the route.
        body: The body, a JSON object.
        headers: Further headers, names in lower case.
        tenant: Tenant of the request; no key is needed.
    """
    answer = InnerAnswer(body)
    sent = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
        "client": None,
        "server": None,
        INTERNAL: Internal(tenant),
    }
    task = asyncio.create_task(_answered(front, scope, answer), name=f"inner call {path}")
    try:
        yield answer
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _answered(front: Any, scope: dict[str, Any], answer: InnerAnswer) -> None:
    try:
        await front(scope, answer.receive, answer.send)
    except Exception:  # as in a server: the caller sees an answer that breaks off
        log.exception("inner_call.broken", path=scope["path"])
    await answer.end()


def _object_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object of one event."""
    try:
        found = msgspec.json.decode(data_of(event))
    except msgspec.DecodeError:
        return None  # `[DONE]`, or a comment
    return found if isinstance(found, dict) else None
