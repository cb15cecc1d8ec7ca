"""
The simulated engine behind HTTP in one process: the baseline of `ops.bench overhead`.

The process has no queues, but the same HTTP server, tokenizer, engine and answer format as a mesh.
`python -m ops.bench.one_process REGISTRY PORT ENGINE` runs the server until a signal; ENGINE is the
engine's settings as JSON.
"""

import argparse
import asyncio
import time
from pathlib import Path
from uuid import uuid4

import msgspec
from starlette.types import Receive, Scope, Send

from ops.engine_runs import generate
from services.agent.answer import AnswerText
from services.agent.backends.base import EngineRequest
from services.agent.backends.bodies.events import ChatEvents, Heading, Usage
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from services.gateway.channel import Channel
from shared.contracts.base import ModelName, RequestId
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.contracts.requests import ChatMessage, FinishReason, Sampling, Tokens
from shared.models.registry import ModelRegistry
from shared.models.tokenizer import Tokenizer
from shared.runtime.clock import SystemClock
from shared.runtime.health import serve_http
from shared.runtime.lifecycle import run_service


class ChatBody(msgspec.Struct, frozen=True):
    """What the server reads of a body."""

    model: str
    messages: tuple[ChatMessage, ...]
    max_tokens: int | None = None
    temperature: float | None = None
    ignore_eos: bool | None = None
    slo: Slo | None = None


class Server:
    """
    An ASGI application that answers streamed chat completions.

    Args:
        engine: Engine on which the model of *entry* is active.
    """

    def __init__(self, engine: SimulatedEngine, entry: ModelEntry) -> None:
        self._engine = engine
        self._entry = entry
        self._tokenizer = Tokenizer.load(Path(entry.path))

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body, more = body + message["body"], message["more_body"]
        await self._answer(msgspec.json.decode(body, type=ChatBody), Channel(send, {}))

    async def _answer(self, body: ChatBody, channel: Channel) -> None:
        request_id = f"req-{uuid4().hex}"
        events = ChatEvents(
            Heading(
                request_id=request_id,
                model=body.model,
                created_at=int(time.time()),
                tool=None,
                includes_usage=True,
            )
        )
        prompt = self._tokenizer.encode(body.messages)
        answer, num_tokens = AnswerText(self._tokenizer.decoder(), ()), 0
        async for output in generate(self._engine, self._request(request_id, body, prompt)):
            _, text, _ = answer.push(output.token_ids)
            opening = b"" if num_tokens else events.begin(0)
            num_tokens += len(output.token_ids)
            await channel.event(opening + events.text(0, text))
        tail = events.text(0, answer.end()) + events.end(0, FinishReason.LENGTH)
        usage = Usage(prompt=len(prompt), cached=0, completion=num_tokens)
        await channel.event(tail + events.close(usage))
        await channel.end()

    def _request(self, request_id: str, body: ChatBody, prompt: Tokens) -> EngineRequest:
        return EngineRequest(
            request_id=RequestId(request_id),
            model=self._entry.name,
            prompt=prompt,
            sampling=Sampling(
                max_tokens=body.max_tokens or 1,
                temperature=body.temperature or 0.0,
                ignore_eos=bool(body.ignore_eos),
            ),
            slo=body.slo or Slo(),
            arrived_at=time.time(),
        )


async def serve(
    registry: ModelRegistry, port: int, settings: SimulatedSettings, stop: asyncio.Event
) -> None:
    """Serve the first model of the registry until *stop* is set."""
    entry = registry.entry(ModelName(registry.bases[0]))
    engine = SimulatedEngine([entry], settings, SystemClock())
    await engine.start()
    await engine.activate(entry.name)
    async with serve_http(Server(engine, entry), host="127.0.0.1", port=port):
        await stop.wait()
    await engine.close()


def main() -> int:
    """Run the server until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.one_process", description=__doc__)
    parser.add_argument("registry", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument(
        "engine", type=lambda text: msgspec.json.decode(text, type=SimulatedSettings)
    )
    options = parser.parse_args()
    registry = ModelRegistry.load(options.registry)
    return run_service(
        "one-process", lambda stop: serve(registry, options.port, options.engine, stop)
    )


if __name__ == "__main__":
    raise SystemExit(main())
