"""Answers of the gateway's own routes that their clients do not read."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.outcomes import Outcome
from services.gateway.resources import ResourceCall, WithResources
from services.gateway.responses.application import stream
from shared.contracts.tenants.keys import Scope
from shared.store.objects.responses import StoredEvent
from tests.unit.gateway.rig import DoorRig, gateway_of, scope_of

pytestmark = pytest.mark.virtual_time


class Endless:
    """Events of a response that does not end."""

    async def follow(self, _response_id: str, *, after: int) -> AsyncIterator[list[StoredEvent]]:
        while True:
            after += 1
            yield [StoredEvent(number=after, type="response.output_text.delta", data=b"{}")]


async def send_parts(call: ResourceCall) -> Outcome:
    await call.channel.begin(headers={})
    while True:
        await call.channel.part(b"part")


async def send_events(call: ResourceCall) -> Outcome:
    feed: Any = Endless()
    response: Any = SimpleNamespace(id=call.object_id)
    outcome = await stream(feed, call, response, after=-1)
    # So that the route can cancel what is not read.
    assert outcome is Outcome.CANCELLED
    return outcome


@pytest.mark.parametrize("handler", [send_parts, send_events])
async def test_client_that_stops_reading_loses_its_slot(door_rig: DoorRig, handler: Any):
    gateway = gateway_of(door_rig, object())
    resource: Any = SimpleNamespace(
        root="/v1/files", name="files", scope=Scope.FILES, routes={"{id}": {"GET": handler}}
    )
    num_sent = 0

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def read_some(_event: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent > 10:
            await asyncio.Event().wait()
        await asyncio.sleep(0.5 * gateway.settings.request_timeout_s)

    application = WithResources(gateway, (resource,), None)
    async with asyncio.timeout(10 * gateway.settings.request_timeout_s):
        await application(scope_of("/v1/files/x", method="GET"), receive, read_some)

    assert (num_sent, gateway.tenants.num_open) == (11, 0)
