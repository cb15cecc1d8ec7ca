"""Streams of servers of others, on their way to the client."""

from collections.abc import AsyncIterator
from typing import Any

from services.gateway.call import Call
from services.gateway.pass_through import _Answer
from shared.contracts.base import RequestId, TenantId
from shared.contracts.errors import ContractError
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ErrorInfo, Final, RequestFailed, StepDetails
from shared.producer.effects import NewTokens
from tests.unit.gateway.rig import MODEL, NOW


class Streamed:
    """A generation with two parts, which then fails."""

    async def __aiter__(self) -> AsyncIterator[NewTokens]:
        for events in ((b"data: 1\n\ndata: 2", b"data: 3"), (b"data: 4", b"")):
            details = tuple(StepDetails(1, (part,)) for part in events)
            yield NewTokens(offset=0, token_ids=(1,), text="", details=details)

    async def final(self) -> Final:
        error = ErrorInfo(message="broken", code="broken", status=500)
        return RequestFailed(request_id=RequestId("r"), error=error, at=NOW)


async def test_events_of_one_message_are_one_part_of_the_body() -> None:
    call = Call(
        call_id="req-1",
        model=MODEL,
        tenant=TenantId("acme"),
        arrived_at=NOW,
        slo=Slo(),
        importance=Importance.HIGH,
        stream=True,
    )
    sent: list[dict[str, Any]] = []

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    error = None
    try:
        await _Answer(send, Streamed(), call).stream()  # type: ignore[arg-type]  # a fake
    except ContractError as raised:
        error = raised

    assert [event.get("body") for event in sent] == [
        None,
        b"data: 1\n\ndata: 2\n\ndata: 3\n\n",
        b"data: 4\n\n",
    ]
    assert str(error) == "broken"
