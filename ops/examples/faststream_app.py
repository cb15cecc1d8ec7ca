"""FastStream app that publishes requests to a mesh: `faststream run faststream_app:app`."""

import os
from typing import Any
from uuid import uuid4

from aio_pika.connection import make_url
from faststream import FastStream
from faststream.rabbit import ExchangeType, RabbitBroker, RabbitExchange, RabbitQueue

URL = os.environ.get("HEADWAY_AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/")
REQUESTS = RabbitExchange("headway.requests", type=ExchangeType.TOPIC, declare=False)
REPLIES = RabbitExchange("headway.replies", type=ExchangeType.DIRECT, declare=False)
QUEUE = RabbitQueue(
    f"reply.faststream.{uuid4().hex}", durable=True, arguments={"x-expires": 600_000}
)
broker = RabbitBroker(URL)
app = FastStream(broker)


async def ask(prompt: str) -> str:
    """Publish a request durably; return its id."""
    request_id = uuid4().hex
    body = {
        "model": "tiny-llama",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0.0,
        "reply": "final",
    }
    await broker.publish(
        body, routing_key="rest", exchange=REQUESTS, message_id=request_id, reply_to=QUEUE.name,
        user_id=make_url(URL).user, persist=True, mandatory=True,
    )  # fmt: skip
    return request_id


@broker.subscriber(QUEUE, REPLIES)
async def on_final(final: dict[str, Any]) -> None:
    """Take a final; the mesh may send it twice."""
    print(final["request_id"], final.get("text", final.get("error")))


@app.after_startup
async def start() -> None:
    for prompt in os.environ.get("PROMPTS", "hello").split(","):
        await ask(prompt)


if __name__ == "__main__":
    raise SystemExit("start with: faststream run faststream_app:app")
