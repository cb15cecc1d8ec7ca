"""All spans of a request have one trace, wherever it ran."""

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ops.otlp import OtlpReceiver, ReceivedSpan, otlp_receiver
from services.mesh.processes import ProcessMesh
from shared.broker import topology
from shared.broker.protocol import OutMessage
from shared.contracts.base import InstanceId, RequestId, encode, tag_of
from shared.contracts.control import EvictRequest
from shared.contracts.requests import ReplyMode
from shared.tracing.attributes import Attribute
from tests.brokers import RabbitServer, eventually, rabbit_targets
from tests.e2e.meshes import LLAMA, mesh_spec, producer_of, read, request
from tests.tracing.spans import SPAN_ID, TRACE, TRACE_ID

pytestmark = pytest.mark.rabbitmq

MAX_TOKENS = 400
SLOW_ENGINE = {"latency": {"constant_s": 0.02, "linear_s": 4e-5, "context_s": 2e-7}}
PROMPT = "an unmistakable secret"
STAY = f"chat {LLAMA}"
PROMPT_STAY = f"text_completion {LLAMA}"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """A receiver to which processes that a test starts export."""
    with otlp_receiver() as opened:
        for name, value in opened.variables.items():
            monkeypatch.setenv(name, value)
        yield opened


@pytest.fixture
def broker(rabbit_servers: Callable[[str], RabbitServer]) -> Iterator[str]:
    with rabbit_servers(rabbit_targets()[0]).fresh_url() as url:
        yield url


def spans_of(receiver: OtlpReceiver, name: str) -> list[ReceivedSpan]:
    """Spans of a name, in the order of their ends."""
    return sorted(
        (span for span in receiver.spans if span.name == name), key=lambda span: span.ended_at
    )


async def hop(receiver: OtlpReceiver, number: int) -> ReceivedSpan:
    """Wait until a request was pulled for the *number*th time."""
    await eventually(lambda: len(spans_of(receiver, "wait")) > number, within_s=60.0)
    return spans_of(receiver, "wait")[number]


def instance(span: ReceivedSpan) -> InstanceId:
    return InstanceId(span.attributes["headway.instance"])


def chat(mesh: ProcessMesh) -> str:
    """Ask for a chat completion; return its text."""
    body = {
        "model": LLAMA,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "slo": {"ttlt_s": 300},
    }
    asked = urllib.request.Request(
        f"{mesh.spec.gateway_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


async def evict(mesh: ProcessMesh, span: ReceivedSpan) -> None:
    """Order the eviction of the request that *span* is about from its instance."""
    order = EvictRequest(
        instance_id=instance(span), request_id=RequestId(span.attributes["headway.request.id"])
    )
    message = OutMessage(body=encode(order), kind=tag_of(EvictRequest), persistent=False)
    async with mesh.open_broker("headway-order") as client:
        key = topology.command_instance(instance(span))
        await client.publish(topology.CONTROL, key, message)


async def test_request_that_was_evicted_and_resumed_after_a_kill_has_one_trace(
    broker: str, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    """The run of the killed agent has no span; its wait and the next hop are in the trace."""
    spec = mesh_spec(broker, tmp_path, agent_settings={"engine": {"simulated": SLOW_ENGINE}})
    async with ProcessMesh(spec) as mesh:
        answer = asyncio.create_task(asyncio.to_thread(chat, mesh))
        first = await hop(receiver, 0)
        await asyncio.sleep(1.0)
        await evict(mesh, first)
        second = await hop(receiver, 1)
        await asyncio.sleep(0.5)
        await mesh.kill(f"agent-{instance(second)}")
        third = await hop(receiver, 2)
        text = await answer
    (server,) = spans_of(receiver, "POST /v1/chat/completions")
    (group,) = spans_of(receiver, "group")
    evicted, finished = spans_of(receiver, STAY)

    assert {span.trace_id for span in receiver.spans} == {server.trace_id}
    assert (server.parent_id, group.parent_id) == ("", server.span_id)
    hops = (first, second, third, evicted, finished)
    assert {span.parent_id for span in hops} == {group.span_id}
    assert [span.attributes["headway.hop"] for span in hops] == [0, 1, 1, 0, 1]
    assert [span.attributes["headway.deliveries"] for span in (first, second, third)] == [0, 0, 1]
    assert "evicted" in evicted.events
    assert "resumed" in finished.events
    assert finished.attributes["gen_ai.usage.output_tokens"] == MAX_TOKENS
    assert server.attributes["http.response.status_code"] == 200
    assert {span.service for span in receiver.spans} == {
        "headway-gateway",
        "headway-planner",
        "headway-agent",
    }
    allowed = {each.value for each in Attribute}
    assert all(span.attributes.keys() <= allowed for span in receiver.spans)
    sent = b"".join(receiver.bodies)
    assert PROMPT.encode() not in sent
    assert text.encode() not in sent


async def test_context_of_an_amqp_producer_is_the_parent(
    broker: str, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    async with (
        ProcessMesh(mesh_spec(broker, tmp_path, agents=1)) as mesh,
        producer_of(mesh) as producer,
    ):
        body = request(0, max_tokens=4)
        await read(await producer.submit(body, reply=ReplyMode.FINAL, trace=TRACE))
        await read(await producer.submit(body, reply=ReplyMode.FINAL))
    groups = spans_of(receiver, "group")
    own = [span for span in receiver.spans if span.trace_id == TRACE_ID]

    assert sorted(span.name for span in own) == sorted(("group", "wait", PROMPT_STAY))
    assert [span.parent_id for span in groups] == [SPAN_ID, ""]
    assert len({span.trace_id for span in receiver.spans}) == 2
