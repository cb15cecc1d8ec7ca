"""How often a response is asked for again, and how it fails then."""

import asyncio
from typing import Any

import msgspec
import pytest

from services.gateway.responses import run as module
from services.gateway.responses.feed import Feed
from services.gateway.responses.run import BROKEN, MAX_BROKEN, ResponseRun, RunTools
from services.gateway.webhooks.settings import WebhookSettings
from shared.contracts.requests import ErrorInfo
from shared.store.objects.responses import StoredEvent
from tests.clocks import FakeClock
from tests.stores import a_response

LATER = {"error": {"message": "later", "type": "rate_limit_error", "code": "over_capacity"}}
TOO_LATE = {"error": {"message": "too late", "type": "timeout_error", "code": "deadline_expired"}}
BREAK: dict[str, Any] = {}
"""What the front sends instead of an error if its answer breaks off."""


class Front:
    """An application whose answers end early, each with its own error."""

    def __init__(self, *errors: dict[str, Any]) -> None:
        self.errors = list(errors)

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        data = b"data: " + msgspec.json.encode(self.errors.pop(0)) + b"\n\n"
        await send({"type": "http.response.body", "body": data, "more_body": True})


class Rows:
    """The row of a response without events."""

    def __init__(self) -> None:
        self.errors: list[ErrorInfo] = []
        """Errors with which the response was ended."""

    async def events(self, _response_id: str) -> list[StoredEvent]:
        return []

    async def end(self, _response_id: str, ending: Any, *, epoch: int) -> None:
        assert epoch == 1
        self.errors.append(ending.keywords["error"])


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.0)


async def ended_with(front: Front) -> list[ErrorInfo]:
    """Errors with which a response ends that *front* answers."""
    rows: Any = Rows()
    commits: Any = None  # nothing is stored
    tools = RunTools(
        rows=rows,
        feed=Feed(rows),
        front=front,
        commits=commits,
        webhooks=WebhookSettings(),
        cancel=lambda _tenant, _key: asyncio.sleep(0),
        clock=FakeClock(),
        stop=asyncio.Event(),
    )
    await ResponseRun(a_response(), tools, is_new=True).run()
    found: list[ErrorInfo] = rows.errors
    return found


async def test_a_response_fails_when_its_answers_break_off_again_and_again():
    front = Front(*[BREAK] * (MAX_BROKEN + 1))

    assert await ended_with(front) == [BROKEN]
    assert front.errors == [BREAK]


async def test_refusals_for_load_do_not_count_as_answers_that_broke_off():
    front = Front(*[LATER] * MAX_BROKEN, BREAK, TOO_LATE)
    (error,) = await ended_with(front)

    assert error.code == "deadline_expired"
    assert front.errors == []
