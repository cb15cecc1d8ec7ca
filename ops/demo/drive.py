"""Sends the demo's workload and collects what came back."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

import openai

from ops.demo.workload import MALFORMED, Planned, Via
from services.mesh.launch import Mesh
from services.mesh.spec import EMBEDDED
from shared.broker import topology
from shared.broker.protocol import BindingSpec, Broker, Delivery, OutMessage, Settlement
from shared.contracts.base import Decoder
from shared.contracts.errors import ContractError, MeshError
from shared.contracts.requests import ReplyMode, RequestCompleted, RequestFailed
from shared.contracts.telemetry import InstanceStatus, RequestObserved
from shared.producer.producer import Producer
from shared.runtime.clock import SystemClock

_decode: Decoder[InstanceStatus | RequestObserved] = Decoder(InstanceStatus | RequestObserved)
ANSWER_TIMEOUT_S = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one request went, seen from where it was sent."""

    class_name: str
    sent_at_s: float
    answered: bool
    attained: bool = False
    ttft_s: float | None = None
    ttlt_s: float | None = None
    max_tbt_s: float | None = None
    output_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class Record:
    """Everything that the report is made from."""

    outcomes: list[Outcome] = field(default_factory=list)
    refusals: dict[str, bool] = field(default_factory=dict)
    """Malformed request -> whether it got the error that it should."""
    instances: dict[str, InstanceStatus] = field(default_factory=dict)
    sent: int = 0
    duration_s: float = 0.0

    @property
    def lost(self) -> int:
        """Requests that were sent and never answered."""
        return self.sent - sum(outcome.answered for outcome in self.outcomes)


async def drive(
    mesh: Mesh, workload: list[Planned], *, progress: Callable[[Record], None]
) -> Record:
    """Send *workload* on time over its channels and wait for every answer."""
    record = Record()
    user_id = "guest"
    if mesh.spec.broker != EMBEDDED:
        user_id = unquote(urlsplit(mesh.spec.broker).username or "guest")
    async with mesh.open_broker("headway-demo") as broker, contextlib.AsyncExitStack() as stack:
        await _observe(broker, record, stack)
        producer = await stack.enter_async_context(
            Producer(broker, name="demo", clock=SystemClock(), user_id=user_id)
        )
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(
                base_url=f"{mesh.spec.gateway_url}/v1", api_key="demo", max_retries=0
            )
        )
        started = time.monotonic()

        async def one(planned: Planned) -> None:
            await asyncio.sleep(max(0.0, started + planned.at_s - time.monotonic()))
            record.sent += 1
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    if planned.request_class.via is Via.HTTP_STREAM:
                        outcome = await _over_http(client, planned)
                    else:
                        outcome = await _over_amqp(producer, planned)
            except TimeoutError:
                outcome = _unanswered(planned, "no answer")
            except MeshError as error:
                outcome = _unanswered(planned, str(error))
            record.outcomes.append(outcome)

        async with asyncio.TaskGroup() as tasks:
            reporter = tasks.create_task(_report(record, started, progress))
            tasks.create_task(_send_malformed(broker, record, workload[0].body.model))
            await asyncio.gather(*(one(planned) for planned in workload))
            record.duration_s = time.monotonic() - started
            reporter.cancel()
        await asyncio.sleep(1.5)  # one more status of each instance
    return record


async def _report(record: Record, started: float, progress: Callable[[Record], None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            record.duration_s = time.monotonic() - started
            progress(record)
            await asyncio.sleep(0.5)


async def _over_amqp(producer: Producer, planned: Planned) -> Outcome:
    reply = ReplyMode.STREAM if planned.request_class.via is Via.AMQP_STREAM else ReplyMode.FINAL
    generation = await producer.submit(planned.body, reply=reply)
    final = await generation.final()
    if isinstance(final, RequestFailed):
        return Outcome(
            class_name=planned.request_class.name,
            sent_at_s=planned.at_s,
            answered=True,
            error=final.error.code,
        )
    return _completed(planned, final)


def _completed(planned: Planned, final: RequestCompleted) -> Outcome:
    verdict = final.verdict
    return Outcome(
        class_name=planned.request_class.name,
        sent_at_s=planned.at_s,
        answered=True,
        attained=verdict.attained,
        ttft_s=verdict.ttft_s,
        ttlt_s=verdict.ttlt_s,
        max_tbt_s=verdict.max_tbt_s,
        output_tokens=final.usage.completion_tokens,
    )


async def _over_http(client: openai.AsyncOpenAI, planned: Planned) -> Outcome:
    """Times are the client's own: what a person in front of a screen sees."""
    body, slo = planned.body, planned.body.slo
    assert slo is not None
    started = last = time.monotonic()
    ttft_s: float | None = None
    max_tbt_s, tokens = 0.0, 0
    try:
        stream = await client.chat.completions.create(
            model=body.model,
            messages=[{"role": "user", "content": str(body.prompt)}],
            max_tokens=body.max_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "application": body.application},
            extra_headers={
                "x-llm-d-slo-ttft-ms": str(int(1000 * (slo.ttft_s or 0))),
                "x-llm-d-slo-tpot-ms": str(int(1000 * (slo.tbt_s or 0))),
            },
        )
        async for chunk in stream:
            now = time.monotonic()
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            if chunk.choices and chunk.choices[0].finish_reason is None:
                if ttft_s is None:
                    ttft_s = now - started
                else:
                    max_tbt_s = max(max_tbt_s, now - last)
                last = now
    except openai.APIError as error:
        return Outcome(
            class_name=planned.request_class.name,
            sent_at_s=planned.at_s,
            answered=not isinstance(error, openai.APIConnectionError),
            error=str(error.code or type(error).__name__),
        )
    attained = ttft_s is not None and ttft_s <= (slo.ttft_s or 0)
    return Outcome(
        class_name=planned.request_class.name,
        sent_at_s=planned.at_s,
        answered=True,
        attained=attained and max_tbt_s <= (slo.tbt_s or 0),
        ttft_s=ttft_s,
        ttlt_s=time.monotonic() - started,
        max_tbt_s=max_tbt_s,
        output_tokens=tokens,
    )


def _unanswered(planned: Planned, error: str) -> Outcome:
    return Outcome(
        class_name=planned.request_class.name,
        sent_at_s=planned.at_s,
        answered=False,
        error=error,
    )


async def _send_malformed(broker: Broker, record: Record, model: str) -> None:
    """As a plain AMQP client would: nothing of ours but the topology's names."""
    answers: dict[str, str] = {}
    arrived = asyncio.Event()
    decode = Decoder[RequestFailed](RequestFailed)

    async def on_reply(delivery: Delivery) -> None:
        with contextlib.suppress(ContractError):  # only errors are expected
            answers[delivery.correlation_id or ""] = decode(delivery.body).error.code
            arrived.set()
        await delivery.settle(Settlement.ACK)

    queue, binding = topology.reply_queue(f"reply.demo-malformed.{time.time_ns()}")
    await broker.declare_queue(queue)
    await broker.bind(binding)
    subscription = await broker.consume(queue.name, on_reply, prefetch=8)
    for name, body, _ in MALFORMED:
        await broker.publish(
            topology.REQUESTS,
            topology.REST_KEY,
            OutMessage(
                body=body.replace(b"%m", model.encode()), message_id=name, reply_to=queue.name
            ),
        )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20.0):
            while len(answers) < len(MALFORMED):
                arrived.clear()
                await arrived.wait()
    record.refusals = {name: answers.get(name) == code for name, _, code in MALFORMED}
    await subscription.cancel()
    await broker.delete_queue(queue.name)


async def _observe(broker: Broker, record: Record, stack: contextlib.AsyncExitStack) -> None:
    async def on_message(delivery: Delivery) -> None:
        with contextlib.suppress(ContractError):  # kinds that the report does not use
            message = _decode(delivery.body)
            if isinstance(message, InstanceStatus):
                record.instances[message.instance_id] = message
        await delivery.settle(Settlement.ACK)

    queue = topology.passing_queue("demo")
    await broker.declare_queue(queue)
    await broker.bind(
        BindingSpec(exchange=topology.TELEMETRY, queue=queue.name, routing_key="status.#")
    )
    subscription = await broker.consume(queue.name, on_message, prefetch=64)
    stack.push_async_callback(subscription.cancel)
