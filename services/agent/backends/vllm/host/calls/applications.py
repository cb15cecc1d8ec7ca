"""vLLM's applications of the models of a host."""

import asyncio
import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import msgspec

from services.agent.backends.base import EngineCall
from services.agent.backends.vllm.host.calls.call_core import CallCoreClient, Caller, in_context_of
from services.agent.backends.vllm.host.calls.collector import collect_steps
from services.agent.backends.vllm.host.calls.events import CallEvents, events_of_call
from services.agent.backends.vllm.host.calls.identity import (
    Identity,
    identity_of_call,
    repeat_ids_and_times,
)
from services.engine_core.pooling import vector_width
from services.engine_core.serve_arguments import serve_arguments
from shared.api.calls import RESPONSES
from shared.contracts.base import Seconds
from shared.contracts.models import ModelEntry

SWITCH_S: Seconds = 0.0005
"""
Time after which a thread of the host lets the other run: the host's event loop needs several turns
for the tokens of one stream while the applications compute.
"""
LEAVE_S: Seconds = 1.0
"""Time that an application has to end the answer to a client that has left."""


class Applications:
    """
    Applications in an event loop of their own, in a thread.

    Making an application takes seconds and rendering a prompt takes milliseconds, in which the
    host's event loop must serve runs.
    """

    def __init__(self) -> None:
        self._entries: dict[str, ModelEntry] = {}
        self._made: dict[str, asyncio.Task[Any]] = {}
        """Model -> its application; used in the thread only."""
        self._leaving: set[asyncio.Task[Any]] = set()
        """Applications of calls that were cancelled."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def know(self, entries: Iterable[ModelEntry]) -> None:
        """
        Add models whose applications may be used, and make those of changed models again. Calls for
        removed adapters may still be queued, so applications keep them.
        """
        for entry in entries:
            before = self._entries.get(entry.name)
            if before is not None:
                adapters = before.adapters | entry.adapters
                entry = msgspec.structs.replace(entry, adapters=adapters)  # noqa: PLW2901
            if before not in (None, entry) and self._loop is not None:
                self._loop.call_soon_threadsafe(self._made.pop, entry.name, None)
            self._entries[entry.name] = entry

    def parses(self, model: str, call: EngineCall) -> bool:
        """
        True if the events of a stream depend on single tokens: parsers read tools and reasoning,
        and the events of Responses have numbers.
        """
        entry = self._entries[model]
        has_tools = entry.tool_parser is not None and b'"tools"' in call.body
        return call.endpoint == RESPONSES or entry.reasoning_parser is not None or has_tools

    async def respond(
        self, model: str, endpoint: str, body: bytes, caller: Caller
    ) -> tuple[int, bytes]:
        """
        The response of *model*'s application to a body: status and body.

        Args:
            model: A model that is known.
            endpoint: Path of the endpoint.
            body: Body for the endpoint; it asks for a stream if *caller* takes events.
            caller: Runs the requests that the application makes, and takes the events.
        """
        exchange = Exchange(endpoint, body, caller.name, caller.events)
        answer = self._responded(model, exchange, caller)
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(answer, self._running_loop())
        )

    def close(self) -> None:
        """Stop the thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            sys.setswitchinterval(SWITCH_S)
            self._loop = asyncio.new_event_loop()
            # A daemon: a broken application must not keep the host alive.
            Thread(target=self._loop.run_forever, name="applications", daemon=True).start()
        return self._loop

    async def _responded(
        self, model: str, exchange: "Exchange", caller: Caller
    ) -> tuple[int, bytes]:
        if (made := self._made.get(model)) is None:
            made = self._made[model] = asyncio.create_task(
                self._make(self._entries[model]), name=f"make the application of {model}"
            )
        try:
            application = await asyncio.shield(made)
        except Exception:  # vLLM raises many kinds of errors here; the next call tries again
            self._made.pop(model, None)
            raise
        in_context_of(caller)
        events_of_call.set(caller.events)
        identity_of_call.set(Identity(caller.name, caller.arrived_at))
        # Local import: see `_make`.
        from services.engine_core.media import ImageReads, current_reads  # noqa: PLC0415

        entry = self._entries[model]
        hosts = {host.lower() for host in entry.allowed_media_hosts}
        current_reads.set(ImageReads(entry.images, hosts))
        await self._run(application, exchange)
        if caller.events is not None:
            caller.events.end()
        return exchange.status, b"".join(exchange.parts)

    async def _run(self, application: Any, exchange: "Exchange") -> None:
        """
        Run the application. If the call is cancelled, the application learns that its client has
        left, since vLLM's tasks would outlive their cancellation.
        """
        running = asyncio.create_task(
            application(exchange.scope, exchange.receive, exchange.send), name="answer a body"
        )
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            exchange.left.set()
            self._leaving.add(running)
            running.add_done_callback(self._leaving.discard)
            asyncio.get_running_loop().call_later(LEAVE_S, running.cancel)
            raise

    async def _make(self, entry: ModelEntry) -> Any:
        # Local import: most hosts answer no calls, and it takes seconds.
        from services.engine_core.application import TASKS, model_application  # noqa: PLC0415

        collect_steps()
        loop = asyncio.get_running_loop()
        tasks = TASKS[entry.task]
        application, _ = await model_application(
            serve_arguments(entry, entry.names),
            tasks,
            lambda config, fail: CallCoreClient(
                loop, tasks=tasks, width=vector_width(config.model_config), fail=fail
            ),
        )
        repeat_ids_and_times()
        # A collection of all of vLLM's objects would stop the host for long. Applications that
        # were replaced are collected here.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        return application


@dataclass(slots=True)
class Exchange:
    """One request and its response, in the form of ASGI."""

    endpoint: str
    body: bytes
    request_id: str
    """Id from which the ids of the response are made."""
    events: CallEvents | None = None
    """Takes the events of a stream."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client leaves."""
    status: int = 500
    parts: list[bytes] = field(default_factory=list)
    _is_read: bool = False
    _streams: bool = False

    @property
    def scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self.endpoint,
            "raw_path": self.endpoint.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(self.body)).encode()),
                (b"x-request-id", self.request_id.encode("latin-1", "replace")),
            ],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
        }

    async def receive(self) -> dict[str, Any]:
        """The body; afterwards waits until the client leaves."""
        if self._is_read:
            await self.left.wait()
            return {"type": "http.disconnect"}
        self._is_read = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, event: dict[str, Any]) -> None:
        if event["type"] == "http.response.start":
            self.status = event["status"]
            kinds = [value for name, value in event["headers"] if name.lower() == b"content-type"]
            self._streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif event["type"] == "http.response.body":
            body = event.get("body", b"")
            if self.events is None or not self._streams:
                self.parts.append(body)
            elif body:
                self.events.wrote(body)
