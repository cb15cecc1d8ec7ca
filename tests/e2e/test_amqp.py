"""Plain AMQP clients, without Headway's code, against a running mesh."""

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import aio_pika
import pytest
import pytest_asyncio

from services.mesh.processes import ProcessMesh
from shared.broker import topology
from tests.brokers import eventually
from tests.e2e.meshes import LLAMA, depths
from tests.requirements import program

pytestmark = [pytest.mark.rabbitmq, pytest.mark.asyncio(loop_scope="module")]


class PlainClient:
    """A client that uses only features of any AMQP library."""

    def __init__(self, channel: aio_pika.abc.AbstractChannel, queue: Any) -> None:
        self._channel = channel
        self._queue = queue

    async def publish(self, body: bytes, *, key: str = "rest", **properties: Any) -> None:
        exchange = await self._channel.get_exchange("headway.requests", ensure=False)
        await exchange.publish(
            aio_pika.Message(body, **({"reply_to": self._queue.name} | properties)), key
        )

    async def replies(self, until: str = "request.") -> list[dict[str, Any]]:
        """Bodies on the reply queue up to the first final."""
        seen: list[dict[str, Any]] = []
        async with asyncio.timeout(30):
            while not seen or not seen[-1]["kind"].startswith(until):
                message = await self._queue.get(no_ack=True, fail=False)
                if message is None:
                    await asyncio.sleep(0.02)
                else:
                    seen.append(json.loads(message.body))
        return seen


@pytest_asyncio.fixture(loop_scope="module")
async def plain(mesh: ProcessMesh) -> AsyncIterator[PlainClient]:
    connection = await aio_pika.connect(mesh.spec.broker)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue(f"reply.plain-{uuid4().hex}", auto_delete=True)
        await queue.bind("headway.replies", routing_key=queue.name)
        yield PlainClient(channel, queue)


def body(**fields: Any) -> bytes:
    values = {"model": LLAMA, "prompt": "hello mesh", "max_tokens": 8, "temperature": 0}
    return json.dumps(values | fields).encode()


async def test_a_request_gets_a_start_message_its_tokens_and_a_final(plain: PlainClient) -> None:
    await plain.publish(body(id="plain-1", slo={"ttft_s": 5}), key="interactive")

    replies = await plain.replies()
    tokens = [t for r in replies[1:-1] for c in r["chunks"] for t in c["token_ids"]]

    assert replies[0]["kind"] == "run.started.v1"
    assert {"tokens.emitted.v1"} == {reply["kind"] for reply in replies[1:-1]}
    assert replies[-1]["kind"] == "request.completed.v1"
    assert replies[-1]["request_id"] == "plain-1"
    assert replies[-1]["token_ids"] == tokens


async def test_a_final_only_request_gets_one_message(plain: PlainClient) -> None:
    await plain.publish(body(reply="final"), message_id="plain-2")
    replies = await plain.replies()
    await plain.publish(body(reply="final"), message_id="plain-3")
    replies += await plain.replies()

    assert [(reply["kind"], reply["request_id"]) for reply in replies] == [
        ("request.completed.v1", "plain-2"),
        ("request.completed.v1", "plain-3"),
    ]


async def test_requests_in_the_format_of_llm_d_async_are_accepted(plain: PlainClient) -> None:
    item = {
        "id": "item-1",
        "created": int(time.time()),
        "deadline": int(time.time()) + 60,
        "payload": {"model": LLAMA, "messages": [{"role": "user", "content": "hi"}]},
        "metadata": {"team": "x"},
    }
    await plain.publish(json.dumps(item).encode())

    replies = await plain.replies()

    assert replies[-1]["kind"] == "request.completed.v1"
    assert replies[-1]["request_id"] == "item-1"


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        (b"{ not json", "invalid_request", None),
        (b"\xff\xfe", "invalid_request", None),
        (b"[]", "invalid_request", None),
        (body(model=7), "invalid_request", None),
        (body(model="no-such-model"), "model_not_found", "model"),
        (body(slo={"ttft_s": 0.0001}), "slo_impossible", "slo.ttft_s"),
        (body(slo={"ttft_s": -1}), "invalid_request", None),
        (body(max_tokens=10**8), "context_length_exceeded", "max_tokens"),
        (body(deadline=1.0), "deadline_expired", "deadline"),
        (body(prompt="x" * 5_000_000), "body_too_large", None),
        (body(messages=[{"role": "user", "content": "x"}]), "invalid_request", "messages"),
        (body(n=2), "unsupported_parameter", "n"),
    ],
)
async def test_bad_input_gets_a_precise_error_and_is_dead_lettered(
    plain: PlainClient, mesh: ProcessMesh, message: bytes, code: str, param: str | None
) -> None:
    request_id = f"bad-{uuid4().hex}"
    await plain.publish(message, message_id=request_id)
    replies = await plain.replies()
    reason = await dead_letter_reason(mesh, request_id)

    assert [reply["kind"] for reply in replies] == ["request.failed.v1"]
    assert request_id == replies[0]["request_id"]
    assert code == replies[0]["error"]["code"]
    assert param == replies[0]["error"].get("param")
    assert reason.startswith(code)


async def dead_letter_reason(mesh: ProcessMesh, request_id: str) -> str:
    """Reason in a request's dead letter, which may arrive a little after the reply."""
    async with asyncio.timeout(30), mesh.open_broker("headway-check") as broker:
        while True:
            letter = await broker.get(topology.DEAD_LETTERS)
            if letter is None:
                await asyncio.sleep(0.05)
            elif letter.message_id == request_id:
                return str(letter.headers[topology.REASON_HEADER])


async def test_unroutable_finals_are_kept(plain: PlainClient, mesh: ProcessMesh) -> None:
    request_id = f"orphan-{uuid4().hex}"
    await plain.publish(body(id=request_id), reply_to="reply.absent-here")

    async with mesh.open_broker("headway-check") as broker:

        async def found() -> bool:
            delivery = await broker.get(topology.UNCLAIMED_FINALS)
            return delivery is not None and delivery.correlation_id == request_id

        await eventually(found)


async def test_amqp_tools_publish_and_receive(mesh: ProcessMesh) -> None:
    program("amqp-publish", "amqp-tools")
    queue = f"reply.tools-{uuid4().hex}"
    url = ["--url", mesh.spec.broker]
    consumer = await asyncio.create_subprocess_exec(
        "amqp-consume", *url, "-q", queue, "-e", "headway.replies", "-r", queue, "-c", "1", "cat",
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        async with mesh.open_broker("headway-check") as broker:

            async def is_consumed() -> bool:
                depth = await broker.depth(queue)
                return depth is not None and depth.consumers > 0

            await eventually(is_consumed, within_s=60.0)
        publish = await asyncio.create_subprocess_exec(
            "amqp-publish", *url, "-e", "headway.requests", "-r", "rest", "-t", queue,
            "-b", body(reply="final", id="tools-1").decode(),
        )  # fmt: skip
        assert await publish.wait() == 0
        output, _ = await asyncio.wait_for(consumer.communicate(), 30)
    finally:
        if consumer.returncode is None:
            consumer.kill()
            await consumer.wait()

    assert json.loads(output)["kind"] == "request.completed.v1"
    assert json.loads(output)["request_id"] == "tools-1"


async def test_no_message_remains_after_the_tests_above(mesh: ProcessMesh) -> None:
    async with mesh.open_broker("headway-check") as broker:

        async def empty() -> bool:
            left = await depths(broker, mesh)
            work = ("lane", "resume", "inbox", "headway.global")
            return not {queue for queue in left if queue.startswith(work)}

        await eventually(empty)
