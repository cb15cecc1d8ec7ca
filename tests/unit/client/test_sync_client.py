"""The client without asyncio ends all its calls when it closes."""

import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pytest

import shared.client.client
from shared.broker import topology
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import OutMessage, PublishOutcome
from shared.client import MeshError, RequestError, connect_sync
from shared.contracts.errors import BrokerUnavailableError

URL = "amqp://127.0.0.1/"
FIELDS: dict[str, Any] = {"model": "m", "prompt": "hello"}


class LostBroker(MemoryBroker):
    """A broker that answers no publish of a request; it says when one has begun."""

    begun = threading.Event()

    async def publish(self, exchange: str, routing_key: str, message: OutMessage) -> PublishOutcome:
        if exchange == topology.REQUESTS:
            self.begun.set()
            raise BrokerUnavailableError("the connection is lost")
        return await super().publish(exchange, routing_key, message)


def use(broker: type[MemoryBroker], patch: pytest.MonkeyPatch) -> None:
    """Let `connect` open a *broker* with the queues of a mesh."""

    @asynccontextmanager
    async def opened(_url: str, *, client_name: str) -> AsyncIterator[MemoryBroker]:
        assert client_name == "client"
        async with broker(MemoryHub()) as it:
            await topology.declare(it)
            yield it

    patch.setattr(shared.client.client, "AmqpBroker", opened)


def in_thread(call: Callable[..., Any], *given: Any, **named: Any) -> Future[Any]:
    """Make a call in a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*given, **named))
        except MeshError as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_waiting_threads_end_with_the_client(monkeypatch: pytest.MonkeyPatch):
    use(MemoryBroker, monkeypatch)
    with connect_sync(URL) as client:
        answer = client.submit(**FIELDS)
        waiting = in_thread(answer.wait)
        asking = in_thread(client.status, "r1", timeout_s=600.0)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.1)

    with pytest.raises(RequestError, match="cancelled"):
        waiting.result(timeout=5.0)
    with pytest.raises(MeshError):
        asking.result(timeout=5.0)


def test_a_submit_during_an_outage_ends_with_the_client(monkeypatch: pytest.MonkeyPatch):
    use(LostBroker, monkeypatch)
    with connect_sync(URL) as client:
        submitting = in_thread(client.submit, **FIELDS)
        assert LostBroker.begun.wait(5.0)

    with pytest.raises(MeshError, match="the client was closed"):
        submitting.result(timeout=5.0)


def test_a_call_after_the_end_says_so(monkeypatch: pytest.MonkeyPatch):
    use(MemoryBroker, monkeypatch)
    with connect_sync(URL) as client:
        answer = client.submit(**FIELDS)

    for call in (lambda: client.submit(**FIELDS), lambda: client.status("r1"), answer.wait):
        with pytest.raises(MeshError, match="the client is closed"):
            call()
