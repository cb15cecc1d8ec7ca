"""The stock OpenAI client against a running mesh."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import Completion

from services.mesh.processes import ProcessMesh
from tests.brokers import eventually
from tests.e2e.meshes import LLAMA, QWEN, num_stopped

pytestmark = [pytest.mark.rabbitmq, pytest.mark.asyncio(loop_scope="module")]

MESSAGES = [{"role": "user", "content": "Say something about queues."}]


@pytest_asyncio.fixture(loop_scope="module")
async def client(mesh: ProcessMesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.spec.gateway_url}/v1", api_key="secret-of-acme", max_retries=0
    ) as client:
        yield client


async def test_a_chat_streams_the_same_text_that_it_returns_whole(
    client: openai.AsyncOpenAI,
) -> None:
    whole = await client.chat.completions.create(
        model=LLAMA, messages=MESSAGES, max_tokens=20, temperature=0
    )
    stream = await client.chat.completions.create(
        model=LLAMA,
        messages=MESSAGES,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, reasons = "", None, []
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []

    assert whole.choices[0].message.content == text
    assert [whole.choices[0].finish_reason] == reasons
    assert usage is not None
    assert whole.usage.completion_tokens == usage.completion_tokens


async def test_a_completion_respects_max_tokens_and_stop(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(
        model=LLAMA, prompt="once", max_tokens=30, temperature=0, extra_body={"ignore_eos": True}
    )
    text = whole.choices[0].text
    stop = text[8:11]
    cut = await client.completions.create(
        model=LLAMA,
        prompt="once",
        max_tokens=30,
        temperature=0,
        stop=[stop],
        extra_body={"ignore_eos": True},
    )

    assert whole.usage.completion_tokens == 30
    assert whole.choices[0].finish_reason == "length"
    assert text[: text.index(stop)] == cut.choices[0].text
    assert cut.choices[0].finish_reason == "stop"


async def test_models_come_from_the_registry(client: openai.AsyncOpenAI) -> None:
    names = {model.id async for model in client.models.list()}

    assert {LLAMA, QWEN} <= names


async def test_an_inactive_model_is_activated_and_served(
    client: openai.AsyncOpenAI, mesh: ProcessMesh
) -> None:
    async with httpx.AsyncClient(base_url=mesh.spec.gateway_url) as http:

        async def instances(what: str) -> int:
            """Number of instances that can serve the model, or on which it is active."""
            found: int = (await http.get("/health")).json()["models"][QWEN][what]
            return found

        async def are_known() -> bool:
            return await instances("able") == len(mesh.spec.agents)

        async def is_active() -> bool:
            return await instances("serving") > 0

        await eventually(are_known)
        was_active = await is_active()
        answer = await client.chat.completions.create(
            model=QWEN, messages=MESSAGES, max_tokens=5, temperature=0
        )
        await eventually(is_active)

    assert not was_active
    assert answer.model == QWEN
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 5


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
        ({"max_tokens": 10**9}, openai.BadRequestError, "max_tokens"),
        ({"n": 0}, openai.BadRequestError, None),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"messages": "hi"}, openai.BadRequestError, "body.messages"),
    ],
)
async def test_bad_requests_are_typed_errors_that_name_the_field(
    client: openai.AsyncOpenAI, fields: dict[str, object], error: type, param: str | None
) -> None:
    values = {"model": LLAMA, "messages": MESSAGES} | fields
    with pytest.raises(error) as caught:
        await client.chat.completions.create(**values)

    assert param == caught.value.param


async def test_a_wrong_key_is_refused(mesh: ProcessMesh) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.spec.gateway_url}/v1", api_key="wrong", max_retries=0
    ) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_a_disconnecting_client_frees_the_engine(
    client: openai.AsyncOpenAI, mesh: ProcessMesh
) -> None:
    stopped = num_stopped(mesh)
    stream = await client.chat.completions.create(
        model=LLAMA,
        messages=MESSAGES,
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        break
    await stream.close()

    await eventually(lambda: num_stopped(mesh) == stopped + 1)


async def test_many_concurrent_chats_all_end(client: openai.AsyncOpenAI) -> None:
    answers = await asyncio.gather(
        *(
            client.chat.completions.create(
                model=LLAMA, messages=MESSAGES, max_tokens=10, temperature=0
            )
            for _ in range(40)
        )
    )

    assert len({answer.choices[0].message.content for answer in answers}) == 1


async def test_a_request_ends_at_its_end(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(
            model=LLAMA,
            prompt="once",
            max_tokens=3000,
            extra_body={"ttl_s": 0.5, "ignore_eos": True},
        )

    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_expired"
    assert caught.value.type == "timeout_error"


async def test_a_stream_ends_with_an_error_event_at_its_end(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=LLAMA,
        prompt="once",
        max_tokens=3000,
        stream=True,
        extra_body={"ttl_s": 1.0, "ignore_eos": True},
    )
    parts = []
    with pytest.raises(openai.APIError) as caught:
        await collect(stream, parts)

    assert parts
    assert caught.value.code == "deadline_expired"


async def collect(stream: AsyncIterator[Completion], parts: list[str]) -> None:
    """Append the texts of a stream to *parts*, also if it breaks."""
    async for chunk in stream:
        parts.append(chunk.choices[0].text)  # noqa: PERF401 - a comprehension would lose them
