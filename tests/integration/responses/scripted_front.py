"""Gateways' parts for stored responses, in front of an application that follows a script."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.gateway.admission import INTERNAL
from services.gateway.responses.feed import Feed
from services.gateway.responses.run import RunTools
from services.gateway.responses.runner import Runner
from services.gateway.responses.service import Created, Responses
from services.gateway.webhooks.settings import WebhookSettings
from shared.contracts.base import ModelName, TenantId
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.runtime.clock import Clock, SystemClock
from shared.store.group_commit import GroupCommit
from shared.store.objects.responses import StoredEvent
from shared.store.settings import StoreSettings
from shared.store.store import Store
from tests.brokers import eventually
from tests.renderings.responses import Event, Rendering, message, reasoning
from tests.stores import ACME, ManualClock, open_store

MODEL = "m"
ITEMS = [reasoning("let me see ..."), message("The answer is 42, as always. " * 6)]
HOOK = {"url": "https://example.com/hook", "secret": "whsec_" + "QUJDREVG" * 4}
WEBHOOKS = msgspec.convert({"endpoints": {"acme": [HOOK]}}, WebhookSettings)


def in_pieces_of(size: int) -> Callable[[str], list[str]]:
    return lambda text: [text[at : at + size] for at in range(0, len(text), size)]


@dataclass(frozen=True)
class Asked:
    """A call that the front has received."""

    tenant: TenantId
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class ScriptedFront:
    """
    Renders the same answer for every call, with other ids and pieces each time.

    Args:
        items: The answer.
        stop_after: Number of events after which a call waits for `resume`; None: it does not.
        refusals: Status and body of the first calls that are refused.
        error_after: Number of events after which an error follows instead of the rest.
    """

    items: list[Event] = field(default_factory=lambda: ITEMS)
    stop_after: int | None = None
    refusals: list[tuple[int, Event]] = field(default_factory=list)
    error_after: int | None = None
    error: Event = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    status: str = "completed"
    piece_chars: int = 3
    """Length of the pieces of texts; they grow with each call."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = msgspec.json.decode((await receive())["body"])
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        number = len(self.asked)
        self.asked.append(Asked(scope[INTERNAL].tenant, headers, body))
        if self.refusals:
            status, refusal = self.refusals.pop(0)
            await self._start(send, status, b"application/json")
            await self._part(send, msgspec.json.encode(refusal))
            return
        rendering = Rendering(
            self.items,
            name=f"r{number}x{self.piece_chars}",
            cut=in_pieces_of(self.piece_chars + 4 * number),
            status=self.status,
        )
        await self._start(send, 200, b"text/event-stream; charset=utf-8")
        for count, event in enumerate(rendering.events):
            if count == self.error_after and number == 0:
                await self._part(send, b"data: " + msgspec.json.encode(self.error) + b"\n\n")
                return
            if count == self.stop_after:
                await self.resume.wait()
            data = msgspec.json.encode(event)
            await self._part(send, b"event: " + event["type"].encode() + b"\ndata: " + data)
            await self._part(send, b"\n\n")

    async def _start(self, send: Any, status: int, kind: bytes) -> None:
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _part(self, send: Any, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})


@dataclass
class Parts:
    """The parts of one gateway."""

    store: Store
    front: ScriptedFront
    feed: Feed
    runner: Runner
    responses: Responses
    cancelled: list[str]
    """Keys of the requests that were cancelled in the mesh."""

    async def create(self, tenant: TenantId = ACME, **fields: Any) -> Created:
        body = {"model": MODEL, "input": "6*7?", "background": True} | fields
        return await self.responses.create(tenant, msgspec.json.encode(body), {})

    killed: asyncio.Event = field(default_factory=asyncio.Event)

    async def kill(self) -> None:
        """End runs and readers as the end of the process does: nothing is written."""
        self.freeze()
        # White box: an orderly stop would leave the responses to others at once.
        await self.runner._tasks.cancel()
        self.killed.set()

    def freeze(self) -> None:
        """Let the gateway neither hold its responses nor take others over; its runs continue."""
        self.runner._closing.set()

    async def read(self, response_id: str, *, after: int) -> AsyncIterator[list[StoredEvent]]:
        """Events after a number, until the gateway is killed."""
        killed = asyncio.create_task(self.killed.wait())
        async with aclosing(self.feed.follow(response_id, after=after)) as batches:
            while not self.killed.is_set():
                following = asyncio.create_task(anext(batches, None))
                await asyncio.wait({following, killed}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
                    break
                if (events := following.result()) is None:
                    break
                yield events
        killed.cancel()

    async def followed(self, response_id: str, *, after: int = -1) -> list[StoredEvent]:
        """All events after a number, to the end."""
        async with asyncio.timeout(60):
            return [
                event
                async for events in self.feed.follow(response_id, after=after)
                for event in events
            ]


@asynccontextmanager
async def gateway_parts(
    settings: StoreSettings,
    front: ScriptedFront,
    *,
    clock: ManualClock | None = None,
    wall_clock: Clock | None = None,
    max_running: int = 1000,
) -> AsyncIterator[Parts]:
    """A gateway's parts on the store of *settings*; the loops of the runner run."""
    cancelled: list[str] = []

    async def cancel(_tenant: TenantId, key: str) -> None:
        cancelled.append(key)

    async with open_store(settings, clock=clock) as store:
        await store.check()
        feed = Feed(store.responses)
        tools = RunTools(
            rows=store.responses,
            feed=feed,
            front=front,
            commits=GroupCommit(store.responses.append),
            webhooks=WEBHOOKS,
            cancel=cancel,
            clock=wall_clock or SystemClock(),
            stop=asyncio.Event(),
        )
        entry = ModelEntry(name=ModelName(MODEL), takes="bodies", max_model_len=512)
        registry = ModelRegistry([entry])
        async with Runner(store, tools, max_running=max_running).running() as runner:
            responses = Responses(store, settings, registry, runner, feed)
            yield Parts(store, front, feed, runner, responses, cancelled)
        # White box: a cancelled query closes its connection later, which must be before the end of
        # the event loop.
        pool = store.database._engine.pool
        await eventually(lambda: pool.checkedout() == 0)  # type: ignore[attr-defined]  # this kind has it
