"""Calls whose time limit passes."""

import asyncio
from typing import Any

import msgspec
import pytest

from services.gateway.door import LAST_WORD_S, Door
from services.gateway.pass_through import PassThrough
from tests.unit.gateway.rig import MODEL, DoorRig, gateway_of, scope_of

pytestmark = pytest.mark.virtual_time
PATH = "/v1/completions"


async def stream_forever(_self: Any, _call: Any, _path: str, _receive: Any, send: Any) -> None:
    """An answer without an end."""
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while True:
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        await asyncio.sleep(1.0)


async def test_client_that_does_not_read_loses_its_slot(
    door_rig: DoorRig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(PassThrough, "answer", stream_forever)
    gateway = gateway_of(door_rig, object())
    door = Door(gateway)
    asked = msgspec.json.encode({"model": MODEL, "prompt": "hello", "stream": True})

    async def receive() -> Any:
        return {"type": "http.request", "body": asked, "more_body": False}

    async def never_read(_event: Any) -> None:
        await asyncio.Event().wait()

    async with asyncio.timeout(gateway.settings.request_timeout_s + 2 * LAST_WORD_S):
        await door(scope_of(PATH), receive, never_read)

    assert gateway.tenants.num_open == 0
