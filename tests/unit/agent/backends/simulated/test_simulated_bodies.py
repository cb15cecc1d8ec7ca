"""Bodies that simulated engines answer, as stock clients read them."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.agent.backends.base import EngineCall, EngineRequest, NewOutput, RunEnded
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from shared.api.events import data_of
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import ContractError, EngineError
from shared.contracts.requests import FinishReason, Progress, Sampling, StepDetails
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.runtime.clock import SystemClock

LLAMA = ModelName("tiny-llama")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "What is a queue?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "days": {"type": "integer"},
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "note": {"type": "string"},
    },
    "required": ["days", "city", "unit"],
}
FUNCTION = {"name": "weather", "parameters": WEATHER}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": HELLO, "max_tokens": 12}),
    "chat, two answers": (CHAT, {"messages": HELLO, "max_tokens": 9, "n": 2, "temperature": 1.0}),
    "chat, tool": (
        CHAT,
        {
            "messages": HELLO,
            "max_tokens": 12,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
        },
    ),
    "completion of two prompts": (COMPLETIONS, {"prompt": ["One", "Two"], "max_tokens": 8}),
    "completion of token ids": (COMPLETIONS, {"prompt": [11, 12, 13]}),
    "response": (RESPONSES, {"input": "Hello", "instructions": "Be brief", "max_output_tokens": 9}),
    "response, tool": (
        RESPONSES,
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
            "max_output_tokens": 9,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "weather"},
        },
    ),
    "message": (MESSAGES, {"messages": HELLO, "max_tokens": 9, "system": "Be brief"}),
    "message, tool": (
        MESSAGES,
        {
            "messages": HELLO,
            "max_tokens": 9,
            "tools": [{"name": "weather", "input_schema": WEATHER}],
            "tool_choice": {"type": "any"},
        },
    ),
}


@dataclass
class Outcome:
    """What a run of a call has reported."""

    children: dict[int, list[int]] = field(default_factory=dict)
    steps: dict[int, list[StepDetails]] = field(default_factory=dict)
    prompt_tokens: int = 0
    response: bytes | None = None
    events: tuple[StepDetails, ...] = ()
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    error: Exception | None = None

    def progress(self) -> tuple[Progress, ...]:
        return tuple(
            Progress(
                token_ids=tuple(self.children[n]),
                details=tuple(StepDetails(step.num_tokens) for step in self.steps[n]),
            )
            for n in sorted(self.children)
        )

    def sent(self) -> bytes:
        """All events that a client has got, in order."""
        return b"".join(step.events for step in self.events)


class Bench:
    """A simulated engine whose calls run one after the other."""

    def __init__(self, registry: ModelRegistry) -> None:
        settings = SimulatedSettings(time_scale=0.0, kv_capacity_tokens=4096)
        entries = [registry.entry(base) for base in registry.bases]
        self.engine = SimulatedEngine(entries, settings, SystemClock())
        self._changed = asyncio.Event()
        self.outcome = Outcome()
        self.engine.listen(self._hear)

    async def run(
        self,
        endpoint: str,
        body: dict[str, Any],
        *,
        streams: bool = False,
        children: tuple[Progress, ...] = (),
        cut_after: int | None = None,
        raw: str | None = None,
    ) -> Outcome:
        """
        Run a call to its end, or until each answer has *cut_after* tokens; *raw* replaces the body.
        """
        self.outcome = Outcome()
        await self.engine.clear_caches()  # the numbers of cached tokens are those of one run
        call = EngineCall(
            endpoint=endpoint,
            body=(raw or json.dumps({"model": LLAMA, **body})).encode(),
            streams=streams,
            seed=7,
            children=children,
        )
        name = RequestId("run")
        self.engine.submit(
            EngineRequest(
                request_id=name,
                origin=RequestId("r1"),
                model=LLAMA,
                prompt=(),
                sampling=Sampling(),
                arrived_at=1_700_000_000.0,
                call=call,
            )
        )
        while self.outcome.response is None and self.outcome.error is None:
            self._changed.clear()
            await self._changed.wait()
            lengths = [len(tokens) for tokens in self.outcome.children.values()]
            if cut_after is not None and lengths and max(lengths) >= cut_after:
                self.engine.abort(name)
                break
        return self.outcome

    def _hear(self, events: Any) -> None:
        for event in events:
            if isinstance(event, RunEnded):
                self.outcome.error = event.error
            elif isinstance(event, NewOutput):
                self._take(event.output)
        self._changed.set()

    def _take(self, output: Any) -> None:
        found = self.outcome
        found.prompt_tokens += output.prompt_tokens
        if output.child is None:
            found.response, found.events = output.response, output.details
            return
        found.children.setdefault(output.child, []).extend(output.token_ids)
        found.steps.setdefault(output.child, []).extend(output.details)
        if output.finish_reason is not None:
            found.reasons[output.child] = output.finish_reason


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    return ModelRegistry.load(make_tiny_models(tmp_path_factory.mktemp("models")))


@pytest.fixture
async def bench(registry: ModelRegistry) -> AsyncIterator[Bench]:
    bench = Bench(registry)
    await bench.engine.start()
    await bench.engine.activate(LLAMA)
    yield bench
    await bench.engine.close()


def _response(endpoint: str, raw: bytes | None) -> Any:
    """The response as stock clients read it."""
    types = {CHAT: ChatCompletion, COMPLETIONS: Completion, RESPONSES: Response, MESSAGES: Message}
    return types[endpoint].model_validate_json(raw or b"")


def _text(endpoint: str, raw: bytes | None) -> str:
    found = _response(endpoint, raw)
    match endpoint:
        case "/v1/chat/completions":
            return "".join(each.message.content or "" for each in found.choices)
        case "/v1/completions":
            return "".join(each.text for each in found.choices)
        case "/v1/responses":
            return str(found.output_text)
    return "".join(block.text for block in found.content if block.type == "text")


@pytest.mark.parametrize("name", BODIES)
async def test_stock_clients_read_whole_and_streamed_answers_of_equal_content(
    bench: Bench, name: str
):
    endpoint, body = BODIES[name]
    whole = await bench.run(endpoint, body)
    streamed = await bench.run(endpoint, body, streams=True)

    assert whole.events == ()
    assert _text(endpoint, whole.response) == _text(endpoint, streamed.response)
    types: dict[str, Any] = {
        CHAT: ChatCompletionChunk,
        # The client constructs chunks of completions without this check: their reason is null.
        COMPLETIONS: dict[str, Any],
        RESPONSES: ResponseStreamEvent,
        MESSAGES: RawMessageStreamEvent,
    }
    data = [data_of(event) for event in streamed.sent().split(b"\n\n") if event]
    assert (data[-1] == b"[DONE]") == (endpoint in (CHAT, COMPLETIONS))
    for each in data:
        if each != b"[DONE]":
            TypeAdapter(types[endpoint]).validate_json(each)


@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_that_is_cut_at_any_token_continues_with_equal_events(
    bench: Bench, name: str
):
    endpoint, body = BODIES[name]
    undisturbed = await bench.run(endpoint, body, streams=True)
    for cut in (1, 2, 5):
        first = await bench.run(endpoint, body, streams=True, cut_after=cut)
        rest = await bench.run(endpoint, body, streams=True, children=first.progress())

        assert rest.response == undisturbed.response
        if len(rest.children) == 1:  # the order of events of several answers is free
            assert rest.sent() == undisturbed.sent()
        assert sorted(rest.sent().split(b"\n\n")) == sorted(undisturbed.sent().split(b"\n\n"))
        known = sum(len(steps) for steps in first.steps.values())
        assert list(rest.events[:known]) == [
            step for number in sorted(first.steps) for step in first.steps[number]
        ]


async def test_each_output_of_a_stream_has_the_events_of_its_tokens(bench: Bench):
    outcome = await bench.run(CHAT, {"messages": HELLO, "max_tokens": 6}, streams=True)

    assert [step.num_tokens for step in outcome.steps[0]] == [1] * len(outcome.children[0])
    assert outcome.prompt_tokens > 0


async def test_usage_counts_each_prompt_once_and_all_answers(bench: Bench):
    outcome = await bench.run(CHAT, BODIES["chat, two answers"][1] | {"ignore_eos": True})
    usage = _response(CHAT, outcome.response).usage

    assert usage.completion_tokens == 18
    assert usage.prompt_tokens == outcome.prompt_tokens


async def test_a_demanded_tool_is_called_with_arguments_of_its_schema(bench: Bench):
    outcome = await bench.run(*BODIES["chat, tool"])
    choice = _response(CHAT, outcome.response).choices[0]
    arguments = json.loads(choice.message.tool_calls[0].function.arguments)

    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "weather"
    assert (arguments["days"], arguments["unit"]) == (0, "C")
    assert isinstance(arguments["city"], str)
    assert arguments["city"]
    assert "note" not in arguments


async def test_an_answer_ends_before_its_stop_string(bench: Bench):
    body = {"messages": HELLO, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = _text(CHAT, (await bench.run(CHAT, body)).response)
    stop = text[10:13]
    outcome = await bench.run(CHAT, body | {"stop": stop}, streams=True)

    assert _text(CHAT, outcome.response) == text[: text.find(stop)]
    assert _response(CHAT, outcome.response).choices[0].finish_reason == "stop"
    assert len(outcome.children[0]) < 40
    assert bench.engine.snapshot().running == 0


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": HELLO, "n": 0}, "n"),
        (CHAT, {"messages": HELLO, "logprobs": True}, "logprobs"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": [{"role": "guest", "content": "x"}]}, "messages"),
        (CHAT, {"messages": HELLO * 4000}, "messages"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["x"] * 100, "n": 2}, "prompt"),
        (COMPLETIONS, {"prompt": [1 << 30]}, "prompt"),
        (RESPONSES, {"input": 5}, "input"),
        (MESSAGES, {"messages": HELLO}, "max_tokens"),
        ("/v1/embeddings", {"input": "x"}, "endpoint"),
    ],
)
async def test_an_invalid_body_ends_with_an_error_that_names_the_field(
    bench: Bench, endpoint: str, body: dict[str, Any], param: str
):
    outcome = await bench.run(endpoint, body)

    assert isinstance(outcome.error, ContractError)
    assert outcome.error.param == param


async def test_a_body_that_cannot_be_read_ends_with_an_error(bench: Bench):
    nested = '{"a":' * 5000 + "1" + "}" * 5000
    raw = f'{{"messages":{json.dumps(HELLO)},"tools":[{nested}]}}'
    outcome = await bench.run(CHAT, {}, raw=raw)

    assert isinstance(outcome.error, EngineError)
    assert "body" in str(outcome.error)


async def test_a_call_ends_with_its_engine(bench: Bench):
    running = asyncio.create_task(bench.run(CHAT, {"messages": HELLO, "ignore_eos": True}))
    while not bench.outcome.children:
        await asyncio.sleep(0)
    await bench.engine.close()

    assert isinstance((await running).error, EngineError)
