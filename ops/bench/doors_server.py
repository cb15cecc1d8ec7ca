"""
A simulated server of `ops.bench doors`: `python -m ops.bench.doors_server PORT ...`.

It answers as a stock `vllm serve --scheduling-policy priority`, or as a plain server with OpenAI's
API, such as those of llama.cpp. One word is one token. `/count` has totals for the bench.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from ops.bench.doors_scheduling import (
    ANSWER_WORDS,
    BLOCK_TOKENS,
    ServerLimits,
    ServerRun,
    ServerScheduler,
    Speed,
    answer_text,
)

VLLM, PLAIN = "vllm", "plain"
VERSION = "0.32.0"
MAX_MODEL_LEN = 32_768
DEFAULT_TOKENS = 16
MOST_LATE_S = 0.05
"""Time by which an iteration may begin late and still end on time, against slow timers."""
_DONE = b"data: [DONE]\n\n"


class Counts(msgspec.Struct, frozen=True):
    """Totals of a server since its start, and its present load."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    with_priority: int = 0
    """Number of requests with a priority other than 0."""


@dataclass(slots=True)
class Texts:
    """The bytes of one kind of answers, made once."""

    model: str
    is_chat: bool

    def chunks(self, *, last: bool = False) -> list[bytes]:
        """Events with one token, for each of `ANSWER_WORDS`."""
        return [self._chunk(f"{word} ", role=False, last=last) for word in ANSWER_WORDS]

    def first(self, *, last: bool = False) -> bytes:
        """The event with the first token."""
        return self._chunk(f"{ANSWER_WORDS[0]} ", role=True, last=last)

    def _chunk(self, text: str, *, role: bool, last: bool) -> bytes:
        finish = "length" if last else None
        if self.is_chat:
            delta = {"role": "assistant", "content": text} if role else {"content": text}
            return self._event({"index": 0, "delta": delta, "finish_reason": finish})
        return self._event({"index": 0, "text": text, "finish_reason": finish})

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event with the numbers of tokens."""
        return _sse(self._head("chat.completion.chunk") | {"choices": [], "usage": usage})

    def whole(self, usage: dict[str, Any]) -> bytes:
        """An answer that is not streamed."""
        text = answer_text(usage["completion_tokens"])
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            said = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, "finish_reason": "length"} | said
        return msgspec.json.encode(
            self._head("chat.completion") | {"choices": [choice], "usage": usage}
        )

    def _head(self, kind: str) -> dict[str, Any]:
        name = kind if self.is_chat else "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-1", "object": name, "created": 1, "model": self.model}

    def _event(self, choice: dict[str, Any]) -> bytes:
        return _sse(self._head("chat.completion.chunk") | {"choices": [choice]})


@dataclass(slots=True)
class SimulatedServer:
    """
    The HTTP application, and the loop of iterations.

    Args:
        model: Name of the model.
        kind: `VLLM` or `PLAIN`.
        scheduler: The order of work.
    """

    model: str
    kind: str
    scheduler: ServerScheduler
    max_blocks: int
    _tokens: dict[ServerRun, "asyncio.Queue[int]"] = field(default_factory=dict)
    """Request -> numbers of its new tokens; of an answer that is not streamed, only of the last."""
    _whole: set[ServerRun] = field(default_factory=set)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _with_priority: int = 0

    def application(self) -> web.Application:
        """The server's pages."""
        made = web.Application(client_max_size=2**26)
        made.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/count", self._count),
                web.post("/v1/chat/completions", self._answer_for(is_chat=True)),
                web.post("/v1/completions", self._answer_for(is_chat=False)),
            ]
        )
        if self.kind == VLLM:
            made.add_routes(
                [web.get("/version", self._version), web.get("/metrics", self._metrics)]
            )
        return made

    async def iterate(self) -> None:
        """Compute iterations until cancelled."""
        due_at = time.perf_counter()
        while True:
            duration_s = self.scheduler.begin()
            if duration_s is None:
                self._wake.clear()
                await self._wake.wait()
                due_at = time.perf_counter()
                continue
            due_at = max(due_at, time.perf_counter() - MOST_LATE_S) + duration_s
            await asyncio.sleep(max(0.0, due_at - time.perf_counter()))
            for run in self.scheduler.end():
                if run.is_over or run not in self._whole:
                    self._tokens[run].put_nowait(run.generated)

    async def _models(self, _request: web.Request) -> web.Response:
        entry: dict[str, Any] = {"id": self.model, "object": "model", "created": 1}
        if self.kind == VLLM:
            entry |= {"owned_by": "vllm", "root": self.model, "max_model_len": MAX_MODEL_LEN}
        else:
            entry |= {"owned_by": "llamacpp"}
        return web.json_response({"object": "list", "data": [entry]})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _metrics(self, _request: web.Request) -> web.Response:
        values = {
            "num_requests_running": self.scheduler.num_running,
            "num_requests_waiting": self.scheduler.num_waiting,
            "kv_cache_usage_perc": self.scheduler.memory_used,
            "iteration_tokens_total_sum": self.scheduler.iteration_tokens,
            "iteration_tokens_total_count": self.scheduler.iterations,
        }
        label = f'model_name="{self.model}"'
        lines = [f"vllm:{name}{{{label}}} {float(value)}" for name, value in values.items()]
        memory = f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="{self.max_blocks}"'
        lines.append(f"vllm:cache_config_info{{{memory},{label}}} 1.0")
        return web.Response(text="\n".join(lines) + "\n")

    async def _count(self, _request: web.Request) -> web.Response:
        counts = Counts(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            prompt_tokens=self.scheduler.prompt_tokens,
            cached_tokens=self.scheduler.cached_tokens,
            answer_tokens=self.scheduler.answer_tokens,
            with_priority=self._with_priority,
        )
        return web.Response(body=msgspec.json.encode(counts), content_type="application/json")

    def _answer_for(
        self, *, is_chat: bool
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        texts = Texts(self.model, is_chat)
        middle, last = texts.chunks(), texts.chunks(last=True)
        first, only = texts.first(), texts.first(last=True)

        async def streamed(
            request: web.Request, run: ServerRun, *, with_usage: bool
        ) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            tokens = self._tokens[run]
            while (number := await tokens.get()) < run.answer_tokens:
                each = (number - 1) % len(ANSWER_WORDS)
                await response.write(first if number == 1 else middle[each])
            end = only if number == 1 else last[(number - 1) % len(ANSWER_WORDS)]
            usage = texts.usage(_usage(run)) if with_usage else b""
            await response.write(end + usage + _DONE)
            return response

        async def answer(request: web.Request) -> web.StreamResponse:
            body = msgspec.json.decode(await request.read())
            run = self._submitted(body, is_chat=is_chat)
            try:
                if body.get("stream"):
                    options = body.get("stream_options") or {}
                    return await streamed(
                        request, run, with_usage=bool(options.get("include_usage"))
                    )
                self._whole.add(run)
                await self._tokens[run].get()
                return web.Response(body=texts.whole(_usage(run)), content_type="application/json")
            finally:
                self.scheduler.abort(run)
                self._whole.discard(run)
                del self._tokens[run]

        return answer

    def _submitted(self, body: dict[str, Any], *, is_chat: bool) -> ServerRun:
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_TOKENS
        priority = int(body.get("priority") or 0) if self.kind == VLLM else 0
        self._with_priority += priority != 0
        run = self.scheduler.submit(_words(body, is_chat=is_chat), int(asked), priority)
        self._tokens[run] = asyncio.Queue()
        self._wake.set()
        return run


def _words(body: dict[str, Any], *, is_chat: bool) -> list[str]:
    """The tokens of a prompt."""
    if not is_chat:
        return str(body.get("prompt", "")).split()
    contents = (message.get("content") or "" for message in body["messages"])
    texts = (
        content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
        for content in contents
    )
    return " ".join(texts).split()


def _usage(run: ServerRun) -> dict[str, Any]:
    return {
        "prompt_tokens": len(run.prompt),
        "completion_tokens": run.answer_tokens,
        "total_tokens": len(run.prompt) + run.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
    }


def _sse(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def _serve(options: argparse.Namespace) -> None:
    limits = ServerLimits(max_running=options.max_running)
    server = SimulatedServer(
        options.model,
        options.kind,
        ServerScheduler(limits, Speed(scale=options.scale)),
        limits.num_blocks,
    )
    # A client that has left ends its request.
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port).start()
    await server.iterate()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.doors_server", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--model", default="m")
    parser.add_argument("--kind", choices=(VLLM, PLAIN), default=VLLM)
    parser.add_argument("--max-running", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="slow motion by this factor")
    uvloop.run(_serve(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
