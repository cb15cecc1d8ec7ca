"""Streams of stock Python clients, one for each endpoint that answers a prompt."""

from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai

from tests.e2e.meshes import LLAMA

PROMPT = "Say something about queues."
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
SIZE = 24


def openai_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def chat(url: str, fields: dict[str, Any]) -> str:
    async with openai_of(url) as client:
        stream = await client.chat.completions.create(
            model=LLAMA, messages=MESSAGES, max_tokens=SIZE, temperature=0, stream=True,
            extra_body=fields,
        )  # fmt: skip
        return "".join([part.choices[0].delta.content or "" async for part in stream])


async def completions(url: str, fields: dict[str, Any]) -> str:
    async with openai_of(url) as client:
        stream = await client.completions.create(
            model=LLAMA, prompt=PROMPT, max_tokens=SIZE, temperature=0, stream=True,
            extra_body=fields,
        )  # fmt: skip
        return "".join([part.choices[0].text async for part in stream])


async def responses(url: str, fields: dict[str, Any]) -> str:
    async with openai_of(url) as client:
        stream = await client.responses.create(
            model=LLAMA, input=PROMPT, max_output_tokens=SIZE, temperature=0, stream=True,
            extra_body=fields,
        )  # fmt: skip
        return "".join(
            [event.delta async for event in stream if event.type == "response.output_text.delta"]
        )


async def messages(url: str, fields: dict[str, Any]) -> str:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.messages.create(
            model=LLAMA, messages=MESSAGES, max_tokens=SIZE, stream=True,
            extra_body=fields | {"temperature": 0},
        )  # fmt: skip
        return "".join(
            [
                event.delta.text
                async for event in stream
                if event.type == "content_block_delta" and event.delta.type == "text_delta"
            ]
        )


CLIENTS: dict[str, Callable[[str, dict[str, Any]], Awaitable[str]]] = {
    "chat": chat,
    "completions": completions,
    "responses": responses,
    "messages": messages,
}
"""Endpoint -> client: takes the base URL and further fields, returns the text."""
