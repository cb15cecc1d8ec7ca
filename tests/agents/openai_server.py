"""A server with the parts of vLLM's HTTP API that agents use, which tests can break."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ops.ports import free_port
from shared.runtime.health import serve_http

WORDS = 100
"""Number of different tokens; the text of token 7 is ` w7`."""


def next_token(before: list[int]) -> int:
    """The token after *before*; depends on all of them."""
    return (sum(before) * 31 + len(before) * 7 + 1) % WORDS


def tokens_of(prompt: Any) -> list[int]:
    """Tokens of a prompt: its ids, or one for each character."""
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        return list(prompt)
    return [ord(each) % WORDS for each in str(prompt)]


@dataclass
class OpenAiServer:
    """State of the server, and what it was asked."""

    model: str = "m"
    version: str | None = "0.32.0"
    """None: a server of another make."""
    priority: bool = False
    waiting: int = 0
    metrics: bool = True
    token_s: float = 0.0
    """Time of one token."""
    refuse: tuple[int, dict[str, Any]] | None = None
    """Status and body with which requests are refused."""
    break_after: int | None = None
    """Number of tokens after which a stream breaks; 0: at its next token."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: set[str | None] = field(default_factory=set)
    open: int = 0
    """Number of streams that are being sent."""
    url: str = ""
    _gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._gate.set()

    def hold(self) -> None:
        """Send no further token until `resume`."""
        self._gate.clear()

    def resume(self) -> None:
        self._gate.set()

    @asynccontextmanager
    async def serving(self, port: int | None = None) -> AsyncIterator[str]:
        """Context with the running server; its address."""
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        async with serve_http(self.application(), host="127.0.0.1", port=port):
            yield self.url

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:
        self.authorizations.add(request.headers.get("authorization"))
        return Response(status_code=200)

    async def _version(self, _request: Request) -> Response:
        if self.version is None:
            return Response(status_code=404)
        return JSONResponse({"version": self.version})

    async def _metrics(self, _request: Request) -> Response:
        if not self.metrics:
            return Response(status_code=404)
        labels = '{engine="0",model_name="m"}'
        return PlainTextResponse(
            f"# HELP vllm:num_requests_running x\nvllm:num_requests_running{labels} {self.open}.0\n"
            f"vllm:num_requests_waiting{labels} {self.waiting}.0\n"
            f"vllm:kv_cache_usage_perc{labels} 0.25\n"
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="64"} 1.0\n'
        )

    async def _models(self, _request: Request) -> Response:
        entry = {"id": self.model, "object": "model", "max_model_len": 512, "parent": None}
        return JSONResponse({"object": "list", "data": [entry]})

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        if body.get("priority") and not self.priority:
            return _error(400, "priority scheduling is not enabled")
        prompt = tokens_of(body["prompt"])
        if body.get("return_token_ids"):
            return await self._answered(body, prompt, _token_choice)
        return await self._answered(body, prompt, _text_choice)

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        return await self._answered(body, tokens_of(json.dumps(body["messages"])), _chat_choice)

    async def _answered(self, body: dict[str, Any], prompt: list[int], choice: Any) -> Response:
        self.bodies.append(body)
        if self.refuse is not None:
            status, content = self.refuse
            return JSONResponse(content, status_code=status)
        tokens = list(self._tokens(body, prompt))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        if body.get("stream"):
            events = self._events(body, tokens, usage, choice)
            return StreamingResponse(events, media_type="text/event-stream")
        text = "".join(f" w{token}" for token in tokens)
        whole = {"message": {"role": "assistant", "content": text}}
        if choice is not _chat_choice:
            whole = {"text": text}  # type: ignore[dict-item]  # JSON
        return JSONResponse(
            {"id": "x", "choices": [{"index": 0, "finish_reason": "length"} | whole]}
            | {"usage": usage}
        )

    def _tokens(self, body: dict[str, Any], prompt: list[int]) -> Iterator[int]:
        # Random answers depend on the seed and, as in vLLM, on the number of tokens of this run.
        seed = body.get("seed") or 0
        random = bool(body.get("temperature", 1.0))
        answer: list[int] = []
        for _ in range(body.get("max_tokens", 8)):
            token = next_token([seed, *answer, *prompt] if random else [*prompt, *answer])
            answer.append(token)
            yield token

    async def _events(
        self, body: dict[str, Any], tokens: list[int], usage: dict[str, int], choice: Any
    ) -> AsyncIterator[bytes]:
        self.open += 1
        try:
            if choice is _chat_choice:
                yield _event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
            for number, token in enumerate(tokens):
                await self._gate.wait()
                await asyncio.sleep(self.token_s)
                if self.break_after is not None and number >= self.break_after:
                    raise ConnectionError("the server breaks")
                is_last = number == len(tokens) - 1
                reason = "length" if is_last else None
                yield _event({"choices": [choice(token) | {"finish_reason": reason}]})
            if (body.get("stream_options") or {}).get("include_usage"):
                yield _event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        finally:
            self.open -= 1


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def _chat_choice(token: int) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": f" w{token}"}}


def _text_choice(token: int) -> dict[str, Any]:
    return {"index": 0, "text": f" w{token}"}


def _token_choice(token: int) -> dict[str, Any]:
    return {"index": 0, "text": f" w{token}", "token_ids": [token]}


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
