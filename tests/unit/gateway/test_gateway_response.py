"""Headers about a tenant's policy in responses of vLLM's application."""

from typing import Any

import pytest

from services.gateway.edge.forms import OPENAI
from services.gateway.response import Response
from shared.contracts.requests import ErrorInfo
from shared.contracts.tenants.policies import RateLimit

HEADERS = {"x-headway-clamped": "ttft_s=0.05->1", "x-ratelimit-remaining-requests": "9"}


class Client:
    """Records the events of a response."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def send(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return list(self.events[0]["headers"])


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
async def test_an_answer_has_the_headers_of_the_policy(kind: bytes):
    client = Client()
    response = Response(client.send, "req-1", None, OPENAI)
    response.add_headers(HEADERS)
    start = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", kind)],
    }
    await response.send(start)
    await response.send({"type": "http.response.body", "body": b"{}", "more_body": False})

    assert (b"x-headway-clamped", b"ttft_s=0.05->1") in client.headers
    assert (b"content-type", kind) in client.headers


async def test_the_headers_of_a_refusal_replace_those_of_the_policy():
    client = Client()
    response = Response(client.send, "req-1", None, OPENAI)
    response.add_headers(HEADERS)
    info = ErrorInfo(
        message="no",
        code="rate_limit_exceeded",
        status=429,
        retry_after_s=3.0,
        requests_limit=RateLimit(limit=9, remaining=0, reset_s=5.0),
    )
    await response.fail(info)

    remaining = [value for name, value in client.headers if name.endswith(b"remaining-requests")]
    assert remaining == [b"0"]
    assert (b"retry-after", b"3") in client.headers
