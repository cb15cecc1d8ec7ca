"""A client of streamed chat completions that costs little CPU time."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.errors import EngineError

HOST = "127.0.0.1"
_READ_BYTES = 1 << 16
_REQUEST_ID = "x-headway-request-id"
_OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One streamed answer, as received by the client."""

    request_id: str
    """Id of the request in the mesh; empty for answers of other servers."""
    sent_at: UnixTime
    """Time before the client opened the connection."""
    ttft_s: Seconds
    """Time from `sent_at` to the first event of the stream, which contains the first token."""
    text: str
    prompt_tokens: int
    output_tokens: int


async def chat(
    port: int, model: ModelName, prompt: str, *, max_tokens: int, ttft_s: Seconds
) -> Chat:
    """
    Send a chat completion over a new connection and read its stream.

    Events are parsed after the stream ends, so that reading one stream hardly delays the other
    streams.

    Raises:
        EngineError: The status is not 200, or the stream ends early.
    """
    began, sent_at = time.perf_counter(), time.time()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(_request(port, model, prompt, max_tokens=max_tokens, ttft_s=ttft_s))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        raw = await reader.read(_READ_BYTES)
        first_s = time.perf_counter() - began
        while part := await reader.read(_READ_BYTES):
            raw += part
    except asyncio.IncompleteReadError as error:
        raise EngineError("the server closed the connection") from error
    finally:
        writer.close()
    status, headers = _head(head)
    if status != _OK:
        raise EngineError(f"status {status}: {raw.decode(errors='replace')[:300]}")
    events = _events(_unchunked(raw))
    usage = next((each["usage"] for each in events if each.get("usage")), None)
    if usage is None:
        raise EngineError(f"the stream ended after {len(events)} events")
    return Chat(
        request_id=headers.get(_REQUEST_ID, ""),
        sent_at=sent_at,
        ttft_s=first_s,
        text="".join(_text(each) for each in events),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
    )


def _request(
    port: int, model: ModelName, prompt: str, *, max_tokens: int, ttft_s: Seconds
) -> bytes:
    body = msgspec.json.encode(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "slo": {"ttft_s": ttft_s},
        }
    )
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        f"host: {HOST}:{port}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _head(text: str) -> tuple[int, dict[str, str]]:
    """Status code and headers of an HTTP response."""
    first, *lines = text.strip().split("\r\n")
    fields = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in fields}


def _unchunked(raw: bytes) -> bytes:
    """The body of a chunked answer (RFC 9112, section 7.1)."""
    body, at = b"", 0
    while (end := raw.find(b"\r\n", at)) >= 0 and (size := int(raw[at:end], 16)):
        body += raw[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return body


def _events(body: bytes) -> list[dict[str, Any]]:
    """Data of all server-sent events of a stream, except [DONE]."""
    data = (line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line)
    return [msgspec.json.decode(each) for each in data if each != b"[DONE]"]


def _text(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content", "") for choice in event["choices"])
