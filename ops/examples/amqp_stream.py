"""
Publishes a request in the form of HTTP over AMQP, and prints the text of its answers as it arrives.

    python -m ops.examples.amqp_stream /v1/completions \
        '{"model": "tiny-llama", "prompt": "hello", "n": 2, "stream": true}'

The stream continues when the request is evicted or its engine crashes: `Answers` has the rules.
"""

import argparse
import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aio_pika

URL = "amqp://guest:guest@127.0.0.1:5672/"


class Answers:
    """
    Joins the runs of one request: each token of each answer counts once.

    A run continues each answer at an offset. Its tokens count until a newer run begins: one with a
    higher hop, or a later one with the same hop.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[int, int] = {}
        """Answer -> number of its tokens that were printed."""
        self._run: dict[str, Any] = {"run_id": None, "hop": -1}

    def begin(self, started: dict[str, Any]) -> None:
        """Take a `run.started`."""
        if started.get("hop", 0) >= self._run.get("hop", 0):
            self._run = started

    def text_of(self, chunk: dict[str, Any]) -> str:
        """The new text in a chunk; empty if its tokens are known or tokens before it were lost."""
        child, offset = chunk.get("child", 0), chunk.get("offset", 0)
        if chunk["run_id"] != self._run["run_id"] or offset != self._num_tokens.get(child, 0):
            return ""
        self._num_tokens[child] = offset + len(chunk["token_ids"])
        return str(chunk.get("text", ""))


async def streamed(
    url: str, endpoint: str, body: dict[str, Any]
) -> AsyncIterator[tuple[int, str] | dict[str, Any]]:
    """Yield the index of an answer and its new text, and at the end the final."""
    connection = await aio_pika.connect(url)
    async with connection:
        channel = await connection.channel()  # publisher confirms are on
        replies = await channel.declare_queue(
            f"reply.{uuid.uuid4().hex}",
            durable=True,
            arguments={"x-expires": 600_000},  # ms without a consumer, if this program dies
        )
        await replies.bind("headway.replies", routing_key=replies.name)
        requests = await channel.get_exchange("headway.requests", ensure=False)
        message = {
            "endpoint": endpoint,
            "body": body | {"stream": True},
            "slo": {"ttft_s": 2.0, "tbt_s": 0.2},
        }
        await requests.publish(
            aio_pika.Message(
                json.dumps(message).encode(),
                message_id=uuid.uuid4().hex,
                reply_to=replies.name,
                user_id=connection.url.user,
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            ),
            routing_key="interactive",
            mandatory=True,
        )
        async for part in _parts(replies):
            yield part
        await replies.delete(if_empty=False, if_unused=False)


async def _parts(
    replies: aio_pika.abc.AbstractQueue,
) -> AsyncIterator[tuple[int, str] | dict[str, Any]]:
    answers = Answers()
    async with replies.iterator() as messages:
        async for message in messages:
            async with message.process():
                reply = json.loads(message.body)
            if reply["kind"] == "run.started.v1":
                answers.begin(reply)
            elif reply["kind"] == "tokens.emitted.v1":
                for chunk in reply["chunks"]:
                    if text := answers.text_of(chunk):
                        yield chunk.get("child", 0), text
            elif reply["kind"] in ("request.completed.v1", "request.failed.v1"):
                yield reply
                return


async def show(url: str, endpoint: str, body: dict[str, Any]) -> None:
    async for part in streamed(url, endpoint, body):
        if isinstance(part, tuple):
            print(json.dumps({"answer": part[0], "text": part[1]}), flush=True)
        else:
            print(json.dumps(part.get("response") or {"error": part["error"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("body", type=json.loads)
    parser.add_argument("--url", default=URL)
    options = parser.parse_args()
    asyncio.run(show(options.url, options.endpoint, options.body))


if __name__ == "__main__":
    main()
