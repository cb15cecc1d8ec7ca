"""The gateway behind the stock OpenAI client and in front of a fake mesh."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import openai
import pytest
import pytest_asyncio

from shared.contracts.ingress import CallRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import ReplyMode
from tests.brokers import BrokerRig, eventually
from tests.integration.gateway_rig import (
    PROMPT_TOKENS,
    GatewayRig,
    Request,
    http_client,
    running_gateway,
)
from tests.tracing.spans import TRACE

MODEL = "tiny-llama"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "hello"}
]


def client_of(rig: GatewayRig, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=key, max_retries=0)


async def test_chat_answers_without_streaming(broker_rig: BrokerRig, registry: Path):
    async with running_gateway(broker_rig, registry) as rig, client_of(rig) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9)
        (request,) = rig.mesh.requests

    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id == f"chatcmpl-{request.body.id}"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == PROMPT_TOKENS + 4
    assert answer.model_extra is not None
    assert answer.model_extra["headway"]["slo_attained"] is True
    assert answer.model_extra["headway"]["instance"] == "i1"


async def test_request_reaches_the_mesh_as_the_contract_specifies(
    broker_rig: BrokerRig, registry: Path
):
    async with running_gateway(broker_rig, registry) as rig, client_of(rig) as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            seed=7,
            extra_headers={"x-slo-ttft-ms": "500", **TRACE.headers},
            extra_body={"application": "chatbot", "priority": -2},
        )
        (request,) = rig.mesh.requests

    body = request.body
    assert body.id is not None
    assert msgspec.json.decode(body.body) == {"model": MODEL, "messages": MESSAGES, "seed": 7}
    assert body == CallRequest(
        endpoint="/v1/chat/completions",
        body=body.body,
        model=MODEL,
        id=body.id,
        slo=Slo(ttft_s=0.5),
        tenant="default",
        application="chatbot",
        importance=body.importance,
        priority=2,
        reply=ReplyMode.FINAL,
        arrived_at=body.arrived_at,
    )
    assert request.delivery.queue == "headway.global.interactive"
    assert request.delivery.message_id == body.id
    assert request.delivery.user_id is not None
    assert request.delivery.headers == TRACE.headers


async def test_chat_streams(broker_rig: BrokerRig, registry: Path):
    async with running_gateway(broker_rig, registry) as rig, client_of(rig) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        ttft = "headway_gateway_request_ttft_seconds_count"
        await eventually(lambda: rig.sample(ttft, qos_class="interactive") == 1)

    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "Hello world"
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_completions_answer_and_stream(broker_rig: BrokerRig, registry: Path):
    async with running_gateway(broker_rig, registry) as rig, client_of(rig) as client:
        whole = await client.completions.create(model=MODEL, prompt="hello", max_tokens=5)
        stream = await client.completions.create(model=MODEL, prompt=[5, 6, 7], stream=True)
        chunks = [chunk async for chunk in stream]

    assert whole.choices[0].text == "Hello world"
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert msgspec.json.decode(rig.mesh.requests[1].body.body)["prompt"] == [5, 6, 7]


async def test_models_are_listed_and_retrieved(broker_rig: BrokerRig, registry: Path):
    async with running_gateway(broker_rig, registry) as rig, client_of(rig) as client:
        names = [model.id async for model in client.models.list()]
        one = await client.models.retrieve(MODEL)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nope/nope")

    assert MODEL in names
    assert one.id == MODEL


async def test_refusals_raise_the_clients_typed_errors(broker_rig: BrokerRig, registry: Path):
    async with running_gateway(broker_rig, registry) as rig, client_of(rig) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, top_p=2)

    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert (bad.value.code, bad.value.param) == ("invalid_request", "top_p")
    assert rig.mesh.requests == []
    assert rig.sample("headway_gateway_requests_total", endpoint="chat", outcome="refused") == 2


async def test_api_keys_are_required_and_select_the_tenant(broker_rig: BrokerRig, registry: Path):
    async with running_gateway(broker_rig, registry, api_keys={"k1": "acme"}) as rig:
        async with client_of(rig, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        async with client_of(rig, "k1") as client:
            await client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                extra_headers={"x-llm-d-inference-fairness-id": "someone-else"},
            )

    assert [request.body.tenant for request in rig.mesh.requests] == ["acme"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(shared_brokers: BrokerRig, registry: Path) -> AsyncIterator[GatewayRig]:
    """A gateway of all failures."""
    async with running_gateway(shared_brokers, registry) as rig:
        yield rig


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (429, openai.RateLimitError),
        (503, openai.InternalServerError),
        (504, openai.InternalServerError),
        (404, openai.NotFoundError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failure_in_the_mesh_keeps_its_status(
    shared: GatewayRig, status: int, error: type[Exception], *, stream: bool
):
    async def refuse(request: Request) -> None:
        await request.fail(status=status, code="because")

    shared.mesh.script = refuse
    async with client_of(shared) as client:
        with pytest.raises(error) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)

    assert isinstance(caught.value, openai.APIStatusError)
    assert (caught.value.status_code, caught.value.code) == (status, "because")
    assert caught.value.response.headers["retry-after"] == "3"


async def test_failure_after_the_first_token_is_the_last_event(
    broker_rig: BrokerRig, registry: Path
):
    async def break_off(request: Request) -> None:
        await request.start()
        await request.tokens(0, "He")
        await request.fail(status=500, code="engine_lost", run="run1")

    async with running_gateway(broker_rig, registry) as rig, http_client() as http:
        rig.mesh.script = break_off
        response = await http.post(
            f"{rig.url}/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        )

    events = response.text.split("\n\n")
    assert response.status_code == 200
    assert '"text":"He"' in events[0]
    assert '"code":"engine_lost"' in events[1]
    assert events[2:] == [""]
