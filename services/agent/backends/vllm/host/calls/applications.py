"""vLLM's applications of the models of a host."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import msgspec

from services.agent.backends.vllm.host.calls.call_core import CallCoreClient, Caller, in_context_of
from services.engine_core.pooling import vector_width
from services.engine_core.serve_arguments import serve_arguments
from shared.contracts.models import ModelEntry


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

    async def respond(
        self, model: str, endpoint: str, body: bytes, caller: Caller
    ) -> tuple[int, bytes]:
        """
        The response of *model*'s application to a body: status and body.

        Args:
            model: A model that is known.
            endpoint: Path of the endpoint.
            body: Body for the endpoint, which asks for no stream.
            caller: Runs the requests that the application makes.
        """
        answer = self._responded(model, Exchange(endpoint, body), caller)
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
        # Local import: see `_make`.
        from services.engine_core.media import ImageReads, current_reads  # noqa: PLC0415

        hosts = self._entries[model].allowed_media_hosts
        current_reads.set(ImageReads(hosts={host.lower() for host in hosts}))
        await application(exchange.scope, exchange.receive, exchange.send)
        return exchange.status, b"".join(exchange.parts)

    async def _make(self, entry: ModelEntry) -> Any:
        # Local import: most hosts answer no calls, and it takes seconds.
        from services.engine_core.application import TASKS, model_application  # noqa: PLC0415

        loop = asyncio.get_running_loop()
        tasks = TASKS[entry.task]
        application, _ = await model_application(
            serve_arguments(entry, entry.names),
            tasks,
            lambda config, fail: CallCoreClient(
                loop, tasks=tasks, width=vector_width(config.model_config), fail=fail
            ),
        )
        return application


@dataclass(slots=True)
class Exchange:
    """One request and its response, in the form of ASGI."""

    endpoint: str
    body: bytes
    status: int = 500
    parts: list[bytes] = field(default_factory=list)
    _is_read: bool = False

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
            ],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
        }

    async def receive(self) -> dict[str, Any]:
        """The body; afterwards waits without end, since the client never leaves."""
        if self._is_read:
            await asyncio.Event().wait()
        self._is_read = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, event: dict[str, Any]) -> None:
        if event["type"] == "http.response.start":
            self.status = event["status"]
        elif event["type"] == "http.response.body":
            self.parts.append(event.get("body", b""))
