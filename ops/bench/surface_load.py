"""Requests of `ops.bench surface`, and a client that counts the events of their answers."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from shared.contracts.base import Seconds
from shared.contracts.errors import EngineError

Body = dict[str, Any]
CONCURRENCY = 16
MAX_TOKENS = 32
LONG_PROMPT_WORDS = 700
"""Number of words of a long prompt, which have about 900 tokens."""
_WORDS = (
    "queue",
    "request",
    "engine",
    "tenant",
    "token",
    "planner",
    "waits",
    "returns",
    "measures",
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["queue", "engine", "planner"]},
        "note": {"type": "string", "pattern": "^[a-z ]{8,16}$"},
    },
    "required": ["count", "kind", "note"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "pick", "parameters": _SCHEMA}}
KINDS: dict[str, Callable[[str], Body]] = {
    "plain": lambda _: {},
    "tools": lambda _: {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 64},
    "schema": lambda _: {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "pick", "schema": _SCHEMA, "strict": True},
        },
        "max_tokens": 64,
    },
    "long prompt": lambda text: {
        "messages": [{"role": "user", "content": " ".join([text] * (LONG_PROMPT_WORDS // 20))}]
    },
    "logprobs": lambda _: {"logprobs": True, "top_logprobs": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Answers to one kind of requests by one server."""

    requests: int
    events: int
    tokens: int
    first_ms: float
    """Mean time to the first event of streamed answers."""


def bodies(kind: str, model: str, number: int, seed: int) -> list[Body]:
    """Seeded chats of one kind; every second one is streamed."""
    words = random.Random(f"{seed} {kind}")
    made = []
    for index in range(number):
        text = " ".join(words.choices(_WORDS, k=20))
        body: Body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": kind not in ("tools", "schema"),
        }
        stream = {"stream": True, "stream_options": {"include_usage": True}} if index % 2 else {}
        made.append(body | KINDS[kind](text) | stream)
    return made


async def served(url: str, asked: Sequence[Body]) -> Served:
    """
    Send *asked* to the server at *url*, `CONCURRENCY` at a time.

    Args:
        url: Base URL of the server.
        asked: Bodies of chat completions.

    Raises:
        EngineError: An answer is an error.
    """
    room = asyncio.Semaphore(CONCURRENCY)
    first_s: list[Seconds] = []
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:

        async def one(body: Body) -> tuple[int, int]:
            content = b""
            async with room:
                sent_at = time.monotonic()
                async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    async for part in answer.aiter_bytes():
                        if not content and "stream" in body:
                            first_s.append(time.monotonic() - sent_at)
                        content += part
            if answer.is_error:
                raise EngineError(f"{url}: {answer.status_code} {content[:300]!r}")
            return _events(content), _tokens(content)

        counts = await asyncio.gather(*(one(body) for body in asked))
    return Served(
        requests=len(asked),
        events=sum(events for events, _ in counts),
        tokens=sum(tokens for _, tokens in counts),
        first_ms=1e3 * sum(first_s) / max(1, len(first_s)),
    )


def _events(content: bytes) -> int:
    """Number of the answer's events with content; 0 for an answer that is not streamed."""
    return max(0, content.count(b"data: ") - 2)


def _tokens(content: bytes) -> int:
    """Number of generated tokens, as the answer reports it."""
    _, _, rest = content.rpartition(b'"completion_tokens":')
    return int(rest.partition(b",")[0].partition(b"}")[0])
