"""
Chats over HTTP and AMQP under evictions, drains and kills of real engines; run this file by its
path.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from services.agent.verbs.cli_lso import order
from services.mesh.processes import ProcessMesh
from shared.broker.protocol import Broker
from shared.contracts.base import InstanceId, RequestId
from shared.contracts.control import EvictRequest, LsoAnswered, LsoOutcome
from shared.contracts.errors import BrokerUnavailableError
from shared.contracts.ingress import CallRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode, RequestCompleted
from shared.models.tiny import TINY_MODELS, make_tiny_models
from shared.producer.producer import Producer
from tests.brokers import RabbitServer, rabbit_targets
from tests.contract.calls.call_cases import CHAT
from tests.contract.calls.call_engines import stable
from tests.differential.answers import first_difference
from tests.differential.models import with_parsers
from tests.e2e.meshes import LLAMA, kill, mesh_spec, producer_of

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq, pytest.mark.vllm]

NUM_CHATS = 60
PATIENCE_S = 480.0
ORDER_TIMEOUT_S = 5.0
"""Maximum wait for an agent's answer; agents that are killed or drain do not answer."""
EVICTED_BEFORE_KILLS = 25
LEAST_CUT, LEAST_CUT_IN_GRAMMARS = 20, 5
AGENTS = (InstanceId("a0"), InstanceId("a1"))
NOTES = ("note", "reason", "summary", "remark")
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"type": "string", "enum": ["new", "old"]},
        # Long enough that an eviction arrives before the end.
        **{name: {"type": "string", "pattern": "^[a-z ]{90,120}$"} for name in NOTES},
    },
    "required": ["count", "kind", *NOTES],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA, "strict": True}}
DONE = LsoOutcome.DONE
GRAMMARS = ("tool", "schema")
KINDS: dict[str, dict[str, Any]] = {
    "tool": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 400},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "pick", "schema": SCHEMA, "strict": True},
        },
        "max_tokens": 400,
    },
    "logprobs": {"logprobs": True, "top_logprobs": 2, "max_tokens": 300, "ignore_eos": True},
    "three": {"n": 3, "max_tokens": 240, "ignore_eos": True, "temperature": 0.9},
}


@dataclass(slots=True)
class Chat:
    """One streamed chat, as the client receives it."""

    kind: str
    body: dict[str, Any]
    choices: dict[int, list[Any]] = field(default_factory=dict)
    """Index of a choice -> its contents, tool arguments and log probabilities, in order."""
    results: list[dict[str, Any]] = field(default_factory=list)
    """The `headway` objects of the chat's requests."""
    request_id: str = ""
    num_events: int = 0
    cut: bool = False
    """True if a request of the chat was evicted after the client had received a part of it."""

    @property
    def answer(self) -> dict[int, str]:
        return {index: json.dumps(_joined(parts)) for index, parts in self.choices.items()}


def chats() -> list[Chat]:
    kinds = cycle(KINDS)
    return [
        Chat(
            kind := next(kinds),
            {
                "model": LLAMA,
                "messages": [{"role": "user", "content": f"Pick items, number {number}."}],
                "stream": True,
                "temperature": 0.0 if number % 2 else 0.9,
                "seed": number,
            }
            | KINDS[kind],
        )
        for number in range(NUM_CHATS)
    ]


def _joined(parts: Sequence[Any]) -> dict[str, Any]:
    """Contents of one choice; the borders of events are no part of the answer."""
    text, logprobs, finish = "", [], None
    arguments: dict[str, str] = {}
    for part in parts:
        delta = part["delta"]
        text += delta.get("content") or delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            name = str(call["index"])
            arguments[name] = arguments.get(name, "") + (call["function"].get("arguments") or "")
        tokens = (part.get("logprobs") or {}).get("content") or ()
        logprobs += [(each["token"], round(each["logprob"], 3)) for each in tokens]
        finish = part.get("finish_reason") or finish
    # vLLM appends an empty object to arguments that end at the limit of tokens, if the last event
    # has arguments; this depends on the number of tokens in that event.
    arguments = {name: each.removesuffix("{}") for name, each in arguments.items()}
    arguments = {name: each for name, each in arguments.items() if each}
    return {"text": text, "arguments": arguments, "logprobs": logprobs, "finish": finish}


def difference(one: dict[int, str], other: dict[int, str]) -> tuple[str, str]:
    """The ends of two answers, from shortly before their first difference."""
    first, second = json.dumps(one), json.dumps(other)
    pairs = enumerate(zip(first, second, strict=False))
    start = max(0, next((n for n, (a, b) in pairs if a != b), min(len(first), len(second))) - 40)
    return first[start : start + 120], second[start : start + 120]


async def stream(client: httpx.AsyncClient, chat: Chat, received: Callable[[Chat], None]) -> None:
    """Read a chat to its end."""
    async with client.stream("POST", "/v1/chat/completions", json=chat.body) as answer:
        assert answer.status_code == 200, await answer.aread()
        chat.request_id = answer.headers["x-headway-request-id"]
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                chat.choices.setdefault(choice["index"], []).append(choice)
            if (results := event.get("headway")) is not None:
                chat.results = results if isinstance(results, list) else [results]
            chat.num_events += 1
            received(chat)


class Evictor:
    """Evicts a request of each chat once, after the client has received some events."""

    def __init__(self, broker: Broker, group: asyncio.TaskGroup) -> None:
        self._broker = broker
        self._group = group
        self._ordered: set[str] = set()
        self.num_evicted = 0
        self._room = asyncio.Semaphore(8)

    def on_event(self, chat: Chat) -> None:
        if chat.num_events > 1 and chat.request_id not in self._ordered:
            self._ordered.add(chat.request_id)
            self._group.create_task(self._evict(chat))

    async def _evict(self, chat: Chat) -> None:
        async with self._room:
            await asyncio.gather(*(self._order(chat, agent) for agent in AGENTS))

    async def _order(self, chat: Chat, agent: InstanceId) -> None:
        command = EvictRequest(instance_id=agent, request_id=RequestId(chat.request_id))
        with suppress(BrokerUnavailableError):  # the machine may stall for seconds
            answer = await order(self._broker, command, timeout_s=ORDER_TIMEOUT_S)
            chat.cut |= isinstance(answer, LsoAnswered) and answer.outcome is DONE
            self.num_evicted += isinstance(answer, LsoAnswered) and answer.outcome is DONE


@pytest_asyncio.fixture
async def mesh(
    rabbit_servers: Callable[[str], RabbitServer], tmp_path: Path
) -> AsyncIterator[ProcessMesh]:
    models = {LLAMA: TINY_MODELS[LLAMA]}
    registry = with_parsers(make_tiny_models(tmp_path / "models", models=models))
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        spec = mesh_spec(
            url,
            tmp_path,
            engine="vllm",
            registry=registry,
            agent_settings={"pull": {"evict_hold_s": 0.1}},
        )
        async with ProcessMesh(spec) as running:
            yield running


async def disturb(
    mesh: ProcessMesh, streams: Sequence[asyncio.Task[Any]], evictor: Evictor
) -> None:
    """Kill one agent and drain the other, after enough chats were evicted."""
    while evictor.num_evicted < EVICTED_BEFORE_KILLS and not all(each.done() for each in streams):
        await asyncio.sleep(0.05)
    await kill(mesh, "agent-a0")
    await mesh.restart("agent-a0")
    await mesh.processes["agent-a1"].stop()
    await mesh.restart("agent-a1")


def check_cuts(storm: Sequence[Chat]) -> None:
    cut = [chat for chat in storm if chat.cut]
    in_grammars = [chat for chat in cut if chat.kind in GRAMMARS]
    print(f"cut between first and last token: {len(cut)}, inside a grammar: {len(in_grammars)}")
    assert len(cut) >= LEAST_CUT
    assert len(in_grammars) >= LEAST_CUT_IN_GRAMMARS


async def test_disturbed_chats_equal_undisturbed_ones(mesh: ProcessMesh) -> None:
    calm, storm = chats(), chats()
    async with (
        httpx.AsyncClient(
            base_url=mesh.spec.gateway_url,
            timeout=PATIENCE_S,
            # With more streams at once, clients read parts long after their publication.
            limits=httpx.Limits(max_connections=16),
        ) as client,
        mesh.open_broker("headway-evictor") as broker,
        asyncio.timeout(PATIENCE_S),
    ):
        await asyncio.gather(*(stream(client, chat, lambda _: None) for chat in calm))
        async with asyncio.TaskGroup() as group:
            evictor = Evictor(broker, group)
            streams = [group.create_task(stream(client, chat, evictor.on_event)) for chat in storm]
            await disturb(mesh, streams, evictor)

    for chat in storm:
        chat.cut &= any(each["hops"] for each in chat.results)
    different = {
        index: (one.kind, difference(one.answer, other.answer))
        for index, (one, other) in enumerate(zip(calm, storm, strict=True))
        if one.answer != other.answer
    }
    assert not different
    for chat in storm:
        assert len(chat.results) in (1, chat.body.get("n", 1))  # one for all answers, or for each
    written = [_joined(chat.choices[0]) for chat in storm if chat.kind in GRAMMARS]
    complete = [each for each in written if each["finish"] != "length"]
    print(f"of {len(written)} answers with a grammar, {len(complete)} end before their limit")
    assert complete
    for answer in complete:
        for value in answer["arguments"].values() or [answer["text"]]:
            json.loads(value)
    check_cuts(storm)


async def test_disturbed_calls_have_the_responses_of_http(mesh: ProcessMesh) -> None:
    storm = chats()
    async with (
        httpx.AsyncClient(base_url=mesh.spec.gateway_url, timeout=PATIENCE_S) as client,
        mesh.open_broker("headway-evictor") as broker,
        producer_of(mesh) as producer,
        asyncio.timeout(PATIENCE_S),
    ):
        bodies = [chat.body | {"stream": False} for chat in storm]
        answers = await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
        async with asyncio.TaskGroup() as group:
            evictor = Evictor(broker, group)
            calls = [group.create_task(called(producer, chat, evictor)) for chat in storm]
            await disturb(mesh, calls, evictor)

    responses = [call.result() for call in calls]
    for chat, answer, response in zip(storm, answers, responses, strict=True):
        wanted = stable({k: v for k, v in answer.json().items() if k != "headway"})
        assert first_difference(wanted, stable(response), chat.kind) is None
    check_cuts(storm)


async def called(producer: Producer, chat: Chat, evictor: Evictor) -> Any:
    """Publish a chat over AMQP; return its response."""
    chat.request_id = f"call-{chat.body['seed']}"
    request = CallRequest(
        endpoint=CHAT,
        body=msgspec.Raw(json.dumps(chat.body).encode()),
        id=chat.request_id,
        slo=Slo(ttlt_s=PATIENCE_S),
    )
    generation = await producer.submit(request, reply=ReplyMode.STREAM)
    async for _ in generation:
        chat.num_events += 1
        evictor.on_event(chat)
    final = await generation.final()
    assert isinstance(final, RequestCompleted), final
    assert isinstance(final.response, msgspec.Raw)
    chat.cut &= final.attempts.hop > 0
    return json.loads(bytes(final.response))
