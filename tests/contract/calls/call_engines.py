"""A vLLM engine that answers calls, and calls that are cut and continued."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from ops.engine_runs import generate
from services.agent.backends.base import EngineCall, EngineOutput, EngineRequest
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
from services.agent.call_answer import CallAnswer
from shared.api.calls import COUNTERS, POOLERS
from shared.contracts.base import ModelName, RequestId, RunId
from shared.contracts.requests import ApiCall, Progress, Sampling
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_POOLING_MODELS, make_tiny_models
from tests.contract.engine.engines import LLAMA, tiny_entries, vllm_rig
from tests.queued import a_request

Response = dict[str, Any]
CHANGING = ("id", "created", "created_at", "completed_at", "item_id", "call_id")
"""Fields that differ between two responses to one body."""
SEED = 11
ARRIVED_AT = 1_800_000_000.0
EMBED = ModelName("tiny-embed")
DIMENSIONS = [8, 32]
"""Lengths to which vectors may be cut."""

_ids = count()


def stable(response: Any) -> Any:
    """*response* without the fields that always differ."""
    if isinstance(response, list):
        return [stable(each) for each in response]
    if isinstance(response, dict):
        return {name: stable(each) for name, each in response.items() if name not in CHANGING}
    return response


@dataclass
class CallRig:
    """An engine on which *model* is active."""

    engine: VllmEngine
    model: ModelName = LLAMA

    async def ask(
        self,
        endpoint: str,
        body: dict[str, Any],
        children: tuple[Progress, ...] = (),
        *,
        cut_after: int | None = None,
        events: bool = False,
        name: str | None = None,
        joins: bool = True,
    ) -> CallAnswer:
        """
        Run a call; its answers continue from their *children*, the progress of earlier runs.

        Args:
            cut_after: Number of new tokens of all answers after which the run is aborted.
            events: True: the answers are streamed as events.
            name: Id of the request; None: a new one.
            joins: True if an event may have the text of several tokens.
        """
        api = ApiCall(
            endpoint=endpoint,
            body=msgspec.Raw(self._encoded(body)),
            pools=endpoint in (*POOLERS, *COUNTERS),
            events=events,
        )
        queued = a_request(prompt=None, call=api, progress=Progress(children=children))
        answer = CallAnswer(queued)
        answer.resume(None)
        known = answer.num_tokens
        request = self._request(endpoint, body, children, events=events, name=name, joins=joins)
        async for output in generate(self.engine, request):
            answer.push(output, RunId("run"), 0.0)
            if cut_after is not None and answer.num_tokens - known >= cut_after:
                self.engine.abort(request.request_id)
                break
        return answer

    async def response(
        self, endpoint: str, body: dict[str, Any], children: tuple[Progress, ...] = ()
    ) -> Response:
        """The response to a call, without the fields that always differ."""
        answer = await self.ask(endpoint, body, children)
        assert answer.response is not None
        response: Response = stable(json.loads(answer.response))
        return response

    async def stream(
        self,
        endpoint: str,
        body: dict[str, Any],
        cuts: tuple[int, ...] = (),
        *,
        name: str,
        joins: bool = True,
    ) -> bytes:
        """All events of a call that is cut after each number of new tokens, and continued."""
        children: tuple[Progress, ...] = ()
        for cut in cuts:
            known = {"events": True, "name": name, "joins": joins}
            evicted = await self.ask(endpoint, body, children, cut_after=cut, **known)
            assert evicted.response is None, "the answer was complete before it was cut"
            children = evicted.progress().children
        answer = await self.ask(endpoint, body, children, events=True, name=name, joins=joins)
        assert answer.response is not None
        return b"".join(step.events for step in answer.events)

    async def num_tokens(self, endpoint: str, body: dict[str, Any], *, name: str) -> int:
        """Number of tokens of all answers to a call."""
        return (await self.ask(endpoint, body, events=True, name=name)).num_tokens

    async def outputs(
        self, endpoint: str, body: dict[str, Any], children: tuple[Progress, ...]
    ) -> list[EngineOutput]:
        request = self._request(endpoint, body, children)
        return [output async for output in generate(self.engine, request)]

    async def settled(self) -> None:
        """Wait until the engine holds no request and no memory."""
        async with asyncio.timeout(30):
            while True:
                state = self.engine.snapshot()
                if (state.running, state.waiting, state.kv_utilization) == (0, 0, 0.0):
                    return
                await asyncio.sleep(0.01)

    def _request(
        self,
        endpoint: str,
        body: dict[str, Any],
        children: tuple[Progress, ...],
        *,
        events: bool = False,
        name: str | None = None,
        joins: bool = True,
    ) -> EngineRequest:
        run = f"call-{next(_ids)}"
        return EngineRequest(
            request_id=RequestId(f"{run}/run"),
            origin=RequestId(name or run),
            arrived_at=ARRIVED_AT,
            model=self.model,
            prompt=(),
            sampling=Sampling(),
            call=EngineCall(
                endpoint=endpoint,
                body=self._encoded(body),
                events=events,
                joins=joins,
                seed=SEED,
                children=children,
            ),
        )

    def _encoded(self, body: dict[str, Any]) -> bytes:
        return json.dumps({"model": self.model} | body).encode()


def embedding_models(directory: Path) -> Path:
    """
    Registry of `EMBED` alone, whose vectors may be cut to `DIMENSIONS`.

    The model is made in *directory*.
    """
    registry = make_tiny_models(directory, models={EMBED: TINY_POOLING_MODELS[EMBED]})
    path = directory / EMBED / "config.json"
    config = json.loads(path.read_text()) | {"matryoshka_dimensions": DIMENSIONS}
    path.write_text(json.dumps(config))
    return registry


@asynccontextmanager
async def call_rig(
    directory: Path, *, reasoning_parser: str | None = None
) -> AsyncIterator[CallRig]:
    """
    An engine of a model with a parser of tool calls and with compact JSON; `EMBED` is another model
    of the engine.
    """
    vllm_rig(directory)  # skips or fails without vLLM
    base = next(each for each in tiny_entries(directory, weights=True) if each.name == LLAMA)
    # Without this setting models with random weights write whitespace without end.
    grammars = {"backend": "xgrammar", "disable_any_whitespace": True}
    entry = msgspec.structs.replace(
        base,
        tool_parser="hermes",
        reasoning_parser=reasoning_parser,
        engine_args={"structured_outputs_config": grammars},
    )
    embed = ModelRegistry.load(embedding_models(directory / "pooling")).entry(EMBED)
    engine = VllmEngine((entry, embed), VllmSettings(log_path=str(directory / "vllm.log")))
    try:
        await engine.start()
        await engine.activate(LLAMA)
        yield CallRig(engine)
    finally:
        await engine.close()
