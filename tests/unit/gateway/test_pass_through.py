"""Streams of servers of others, on their way to the client."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from services.gateway.call import Call
from services.gateway.pass_through import _Answer
from shared.contracts.base import RequestId, TenantId
from shared.contracts.errors import ContractError
from shared.contracts.ingress import CallRequest
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ErrorInfo, Final, RequestFailed, StepDetails
from shared.producer.effects import NewTokens
from tests.integration.gateway_rig import completed
from tests.unit.gateway.rig import MODEL, NOW

BODY = CallRequest(
    endpoint="/v1/completions",
    body=msgspec.Raw(b'{"model":"m","prompt":"p"}'),
    model=MODEL,
    events=True,
)


class Streamed:
    """A generation with two parts, which then fails."""

    async def __aiter__(self) -> AsyncIterator[NewTokens]:
        for events in ((b"data: 1\n\ndata: 2", b"data: 3"), (b"data: 4", b"")):
            details = tuple(StepDetails(1, events=part) for part in events)
            yield NewTokens(offset=0, token_ids=(1,), text="", details=details)

    async def final(self) -> Final:
        error = ErrorInfo(message="broken", code="broken", status=500)
        return RequestFailed(request_id=RequestId("r"), error=error, at=NOW)


def a_call() -> Call:
    return Call(
        call_id="req-1",
        model=MODEL,
        tenant=TenantId("acme"),
        arrived_at=NOW,
        slo=Slo(),
        importance=Importance.HIGH,
        stream=True,
    )


async def test_events_of_one_message_are_one_part_of_the_body() -> None:
    sent: list[dict[str, Any]] = []

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    error = None
    try:
        await _Answer(send, Streamed(), a_call()).stream()  # type: ignore[arg-type]  # a fake
    except ContractError as raised:
        error = raised

    assert [event.get("body") for event in sent] == [
        None,
        b"data: 1\n\ndata: 2\n\ndata: 3\n\n",
        b"data: 4\n\n",
    ]
    assert str(error) == "broken"


class Repeated:
    """
    A generation of two answers whose first run had other steps than the second one, and some of
    whose messages were lost.
    """

    async def __aiter__(self) -> AsyncIterator[NewTokens]:
        joined = (StepDetails(2, events=b"data: a12\n\n"),)
        yield NewTokens(offset=0, token_ids=(1, 2), text="", details=joined)
        other = (StepDetails(1, events=b"data: b1\n\n"),)
        yield NewTokens(offset=0, token_ids=(5,), text="", details=other, child=1)
        yield NewTokens(offset=2, token_ids=(3,), text="")

    async def final(self) -> Final:
        steps = [StepDetails(1, events=b"data: a%d\n\n" % n) for n in (1, 2, 3)]
        steps += [StepDetails(1, events=b"data: b%d\n\n" % n, child=1) for n in (1, 2)]
        steps.append(StepDetails(0, events=b"data: [DONE]\n\n"))
        final = completed(BODY)
        return msgspec.structs.replace(final, details=tuple(steps), response=msgspec.Raw(b"null"))


async def test_events_of_lost_messages_are_sent_with_the_final_once() -> None:
    sent: list[bytes] = []

    async def send(event: dict[str, Any]) -> None:
        sent.append(event.get("body", b""))

    await _Answer(send, Repeated(), a_call()).stream()  # type: ignore[arg-type]  # a fake

    assert b"".join(sent).split(b"\n\n") == [
        *(b"data: a12", b"data: b1", b"data: a3", b"data: b2", b"data: [DONE]"),
        b"",
    ]
