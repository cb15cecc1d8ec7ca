"""Handling of one HTTP request when the mesh refuses all requests."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import msgspec

from services.gateway.exchange import Exchange
from services.gateway.shapes import COMPLETIONS
from shared.contracts.errors import TransientError
from shared.contracts.ingress import InferenceRequest
from tests.clocks import NOW, FakeClock
from tests.unit.gateway.rig import COMPLETION, IntakeRig, gateway_of, scope_of


class Producer:
    """A fake producer that records and refuses requests."""

    def __init__(self) -> None:
        self.given: list[InferenceRequest] = []

    async def submit(self, body: InferenceRequest, **_: object) -> None:
        self.given.append(body)
        raise TransientError("the broker is unavailable")


class Client:
    """The `receive` of a client; *read* is set when the body is read."""

    def __init__(self) -> None:
        self.read = asyncio.Event()

    async def receive(self) -> Any:
        self.read.set()
        body = msgspec.json.encode(COMPLETION | {"slo": {"ttlt_s": 30.0}})
        return {"type": "http.request", "body": body, "more_body": False}


async def _send(_message: Any) -> None: ...


async def test_arrival_time_precedes_the_wait_for_a_thread(intake_rig: IntakeRig) -> None:
    clock, producer, client, free = FakeClock(), Producer(), Client(), Event()
    scope = scope_of("/v1/completions")
    gateway = gateway_of(intake_rig, producer, clock=clock)
    exchange = Exchange(gateway, COMPLETIONS, scope, client.receive)
    with ThreadPoolExecutor(max_workers=1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        threads.submit(free.wait, 10)
        try:
            answering = asyncio.create_task(exchange.run(_send), name="exchange")
            await client.read.wait()
            clock.advance(7.0)
        finally:
            free.set()
        await answering

    (ingress,) = producer.given
    assert ingress.arrived_at == NOW
