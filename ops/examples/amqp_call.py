"""
Publishes a request in the form of HTTP over AMQP, and prints the response.

    python -m ops.examples.amqp_call /v1/chat/completions \
        '{"model": "tiny-llama", "messages": [{"role": "user", "content": "hello"}]}'
"""

import argparse
import asyncio
import json
import uuid
from typing import Any

import aio_pika

URL = "amqp://guest:guest@127.0.0.1:5672/"


async def response_of(url: str, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    """The response of *endpoint* to *body*, or an object with `error`."""
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
        await requests.publish(
            aio_pika.Message(
                json.dumps({"endpoint": endpoint, "body": body}).encode(),
                message_id=uuid.uuid4().hex,
                reply_to=replies.name,
                user_id=connection.url.user,
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            ),
            routing_key="rest",
            mandatory=True,
        )
        final = await _final(replies)
        await replies.delete(if_empty=False, if_unused=False)
    return final["response"] if "response" in final else {"error": final["error"]}


async def _final(replies: aio_pika.abc.AbstractQueue) -> dict[str, Any]:
    async with replies.iterator() as messages:
        async for message in messages:
            async with message.process():
                reply: dict[str, Any] = json.loads(message.body)
            if reply["kind"] in ("request.completed.v1", "request.failed.v1"):
                return reply
    raise ConnectionError("the reply queue was deleted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("body", type=json.loads)
    parser.add_argument("--url", default=URL)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(response_of(options.url, options.endpoint, options.body))))


if __name__ == "__main__":
    main()
