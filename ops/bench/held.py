"""
Requests that are held for longer than RabbitMQ's `consumer_timeout`, on a stock RabbitMQ 4.

A private node of RabbitMQ 4 has its default configuration except `consumer_timeout`, and the mesh
connects as a user with plain rights on one virtual host. The agents hold all requests at once: some
run, the others wait in windows. One answer takes twice as long as the others. The bench counts the
channels that the node has closed, the requests without an answer, and the tokens that were sent
more than once.
"""

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ops.bench.meshes import MODEL, bench_mesh, simulated_agent
from ops.bench.progress import say
from ops.bench.result import Line, Result
from ops.broker import FAST_TICKS, PrivateNode
from ops.releases import install_four
from services.agent.backends.settings import SimulatedSettings
from services.mesh.processes import ProcessMesh
from services.mesh.spec import AgentSpec
from shared.broker import topology
from shared.broker.listening import listening
from shared.broker.protocol import BindingSpec, Delivery, Settlement
from shared.contracts.base import Decoder, InstanceId, RequestId, Seconds
from shared.contracts.errors import ContractError
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.ingress import InferenceRequest
from shared.contracts.lanes import inbox_name
from shared.contracts.qos import Slo
from shared.contracts.requests import (
    Final,
    Reply,
    ReplyMode,
    RequestCompleted,
    RunStarted,
    TokensEmitted,
)
from shared.contracts.telemetry import InstanceStatus
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock

USER, VHOST = "plain", "plain"
AGENTS = ("held-0", "held-1")
_decode: Decoder[Reply] = Decoder(Reply)
_decode_status: Decoder[InstanceStatus] = Decoder(InstanceStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One form of the bench."""

    consumer_timeout_s: Seconds
    requests: int
    running: int
    """Number of requests that one engine runs at once."""
    step_s: Seconds
    """Time of one token."""
    tokens: int
    """Tokens of an answer; the long answer has twice as many."""
    advanced: str = "[]."


FULL = Size(consumer_timeout_s=60.0, requests=1000, running=350, step_s=1.0, tokens=300)
QUICK = Size(
    consumer_timeout_s=5.0,
    requests=100,
    running=35,
    step_s=0.2,
    tokens=40,
    advanced=FAST_TICKS,
)


@dataclass(slots=True)
class Seen:
    """Copies of all replies to the producer, and the agents' statuses."""

    held: dict[InstanceId, int] = field(default_factory=dict)
    """Agent -> number of requests that it holds."""
    most_held: int = 0
    tokens: Counter[RequestId] = field(default_factory=Counter)
    runs: Counter[RequestId] = field(default_factory=Counter)
    num_copies: int = 0
    """Number of copies that agents have published to renew requests."""

    def on_status(self, status: InstanceStatus) -> None:
        """Take over the number of requests that an agent holds."""
        self.held[status.instance_id] = status.running + status.waiting
        self.most_held = max(self.most_held, sum(self.held.values()))

    async def on_copy(self, delivery: Delivery) -> None:
        """Count a message to an inbox."""
        self.num_copies += 1
        await delivery.settle(Settlement.ACK)

    async def on_reply(self, delivery: Delivery) -> None:
        """Count the tokens and the starts of runs in a reply."""
        with contextlib.suppress(ContractError):
            reply = _decode(delivery.body)
            if isinstance(reply, RunStarted):
                self.runs[reply.request_id] += 1
            elif isinstance(reply, TokensEmitted):
                for chunk in reply.chunks:
                    self.tokens[chunk.request_id] += len(chunk.token_ids)
        await delivery.settle(Settlement.ACK)


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:  # noqa: ARG001 - it reads its node's log
    """
    Run the benchmark; a quick run has a timeout of 5 s and 100 requests.

    Args:
        seed: First token of the prompts.
        quick: Selects the small form.
        broker: Ignored: the bench starts a node of its own.
    """
    size = QUICK if quick else FULL
    result = Result(name="held", seed=seed, quick=quick)
    release = await asyncio.to_thread(install_four)
    with tempfile.TemporaryDirectory(prefix="headway-held-") as directory:
        node = PrivateNode(
            Path(directory),
            release=release,
            settings={"consumer_timeout": round(1000 * size.consumer_timeout_s)},
            advanced=size.advanced,
        )
        try:
            await asyncio.to_thread(node.start)
            await asyncio.to_thread(_add_user, node)
            await _measure(result, size, node, seed)
        finally:
            await asyncio.to_thread(node.close)
    return result


def _add_user(node: PrivateNode) -> None:
    """Create a user without a tag, with all rights on one virtual host."""
    node.ctl("add_vhost", VHOST)
    node.ctl("add_user", USER, USER)
    node.ctl("set_permissions", "-p", VHOST, USER, ".*", ".*", ".*")


async def _measure(result: Result, size: Size, node: PrivateNode, seed: int) -> None:
    url = f"amqp://{USER}:{USER}@127.0.0.1:{node.port}/{VHOST}"
    agents = tuple(_agent(name, size) for name in AGENTS)
    async with bench_mesh(url, agents) as mesh:
        began, log = time.monotonic(), asyncio.create_task(_progress(node))
        try:
            finals, seen = await _answers(mesh, size, seed)
        finally:
            log.cancel()
        took_s = time.monotonic() - began
    completed = [each for each in finals if isinstance(each, RequestCompleted)]
    waits_s = sorted(each.timings.finished_at - each.timings.pulled_at for each in completed)
    answered = sum(each.usage.completion_tokens for each in completed)
    result.figures |= {
        "requests": len(finals),
        "consumer_timeout, s": size.consumer_timeout_s,
        "most requests held at once": seen.most_held,
        "held, shortest, s": round(waits_s[0], 1) if waits_s else None,
        "held, median, s": round(waits_s[len(waits_s) // 2], 1) if waits_s else None,
        "held, longest, s": round(waits_s[-1], 1) if waits_s else None,
        "tokens of answers": answered,
        "copies published": seen.num_copies,
        "runs begun": seen.runs.total(),
        "took, s": round(took_s, 1),
    }
    again = sum(
        max(0, seen.tokens[each.request_id] - each.usage.completion_tokens) for each in completed
    )
    for name, value in (
        ("channels closed", node.num_timeouts),
        ("tokens computed twice", again),
        ("runs begun twice", sum(count - 1 for count in seen.runs.values())),
        ("requests lost", len(finals) - len(completed)),
    ):
        result.lines.append(Line(name=name, value=value, bound=0))


def _agent(name: str, size: Size) -> AgentSpec:
    engine = SimulatedSettings(
        latency=LatencyCoefficients(constant_s=size.step_s, linear_s=0.0),
        max_running=size.running,
        token_budget=1 << 14,
        kv_capacity_tokens=1 << 22,
        safepoint_layers=0,
    )
    spec = simulated_agent(name, engine)
    bounds = {"window": size.requests, "best_effort_window": size.requests, "max_backlog_s": 1e9}
    spec.settings.update(consumer_timeout_s=size.consumer_timeout_s, pull=bounds)
    return spec


async def _answers(mesh: ProcessMesh, size: Size, seed: int) -> tuple[list[Final], Seen]:
    """Send all requests; return their finals, and what was seen meanwhile."""
    seen = Seen()
    async with (
        mesh.open_broker("headway-held") as broker,
        Producer(broker, name="held", clock=SystemClock(), user_id=USER) as producer,
    ):
        queue = topology.temporary_queue("held")
        await broker.declare_queue(queue)
        await broker.bind(
            BindingSpec(
                exchange=topology.REPLIES, queue=queue.name, routing_key=producer.reply_queue
            )
        )
        await broker.consume(queue.name, seen.on_reply, prefetch=256)
        copies = topology.temporary_queue("held-copies")
        await broker.declare_queue(copies)
        for name in AGENTS:
            await broker.bind(
                BindingSpec(
                    exchange=topology.LANES, queue=copies.name, routing_key=inbox_name(name)
                )
            )
        await broker.consume(copies.name, seen.on_copy, prefetch=256)
        statuses = topology.temporary_queue("held-statuses")
        keys = [(topology.TELEMETRY, topology.STATUS_KEYS)]
        async with listening(broker, statuses, _decode_status, keys, seen.on_status):
            bodies = [_body(number, size, seed) for number in range(size.requests)]
            generations = await asyncio.gather(
                *(producer.submit(body, reply=ReplyMode.STREAM) for body in bodies)
            )
            finals = await asyncio.gather(*(each.final() for each in generations))
            await asyncio.sleep(1.0)  # the last copies of replies
    return list(finals), seen


def _body(number: int, size: Size, seed: int) -> InferenceRequest:
    return InferenceRequest(
        model=MODEL,
        prompt=tuple(20 + (seed + number + place) % 400 for place in range(16)),
        max_tokens=size.tokens * (2 if number == 0 else 1),
        temperature=0.0,
        ignore_eos=True,
        slo=Slo(ttlt_s=36_000.0),
    )


async def _progress(node: PrivateNode) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(30.0)
        say(f"after {time.monotonic() - began:.0f} s: {node.num_timeouts} channels closed")
