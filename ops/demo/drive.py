"""Measures a mesh's capacity, sends the load, kills an agent, and collects the outcomes."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ops.demo.arms import MAX_RUNNING, MODELS, Arm
from ops.demo.judging import Outcome, Timeline, judge
from ops.demo.totals import AgentTotals
from ops.demo.workload import (
    KILL_AT,
    MALFORMED,
    Planned,
    endless_requests,
    mean_output_tokens,
)
from services.mesh.mesh import Mesh
from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage, Settlement
from shared.contracts.base import Decoder, Seconds
from shared.contracts.errors import ContractError, MeshError
from shared.contracts.qos import QosClass
from shared.contracts.requests import ReplyMode, RequestCompleted, RequestFailed
from shared.producer.generation import RunDivergedError
from shared.producer.producer import Producer

ANSWER_TIMEOUT_S: Seconds = 90.0
"""
Time after sending at which a request without an answer counts as lost, even if the mesh still holds
it.
"""
RAMP_S: Seconds = 2.0
"""Start of a closed loop that is not measured, since all requests are then in their prefill."""
LOOP_CONCURRENCY = MAX_RUNNING * 3 // 2
"""
Number of requests per agent in a closed loop: all running slots are in use, and some requests wait.
"""
RESTART_AFTER_S: Seconds = 2.0
"""Time from the kill of an agent to its restart; in production, a supervisor restarts the agent."""
STATUS_WAIT_S: Seconds = 1.3
"""Time within which every agent has published a status."""


@dataclass(slots=True)
class Record:
    """All recorded data of one arm of the demo."""

    outcomes: list[Outcome] = field(default_factory=list)
    refusals: dict[str, bool] = field(default_factory=dict)
    """Malformed request -> true if the request got the expected error."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counters of the agents during the load, by name."""
    capacity_rps: float = 0.0
    sent: int = 0
    wall_s: Seconds = 0.0
    """Time from the first sent request to the last answer."""
    kill_s: Seconds | None = None
    """Time of the agent's kill, from the start of the load."""
    most_send_lag_s: Seconds = 0.0
    """Largest delay between the planned time and the actual time of sending a request."""


async def measure_capacity(
    arm: Arm, producer: Producer, *, window_s: Seconds, seed: int
) -> dict[str, float]:
    """
    Requests of the mix per second that the mesh serves while all running slots are in use.

    A closed loop per agent sends streamed requests for the model that is active there at the start.
    The rate is computed from tokens, because requests are too few for a stable rate. The loops also
    warm up the engines and the estimator.

    Returns:
        Initial model -> rate of its requests.
    """
    stop = asyncio.Event()
    sources = [
        endless_requests(model, seed=f"{seed}-{number}")
        for number, model in enumerate(arm.initial_models)
    ]
    tokens: Counter[str] = Counter()
    tasks = [
        asyncio.create_task(_loop(arm, producer, source, tokens, stop))
        for source in sources
        for _ in range(LOOP_CONCURRENCY)
    ]
    await asyncio.sleep(RAMP_S)
    before, began = tokens.copy(), time.monotonic()
    await asyncio.sleep(window_s)
    num_answers = (time.monotonic() - began) * mean_output_tokens()
    rates = {m: (tokens[m] - before[m]) / num_answers for m in dict.fromkeys(arm.initial_models)}
    stop.set()
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    return rates


async def _loop(
    arm: Arm,
    producer: Producer,
    source: Iterator[Planned],
    tokens: Counter[str],
    stop: asyncio.Event,
) -> None:
    while not stop.is_set():
        body = arm.published(next(source).body)
        generation = await producer.submit(body, reply=ReplyMode.STREAM)
        try:
            async for part in generation:
                tokens[body.model] += len(part.token_ids)
        finally:
            await generation.cancel()


async def drive(
    arm: Arm,
    mesh: Mesh,
    producer: Producer,
    workload: list[Planned],
    *,
    duration_s: Seconds,
    totals: AgentTotals,
    progress: Callable[[Record], None],
) -> Record:
    """
    Send the requests of *workload* at their times, kill an agent at `KILL_AT`, and wait for every
    answer.
    """
    record = Record()
    await asyncio.sleep(STATUS_WAIT_S)
    before = totals.counts()
    started = time.monotonic()

    async def one(planned: Planned) -> None:
        await asyncio.sleep(max(0.0, started + planned.at_s - time.monotonic()))
        sent_at_s = time.monotonic() - started
        record.most_send_lag_s = max(record.most_send_lag_s, sent_at_s - planned.at_s)
        record.sent += 1
        timeline = await _ask(arm, producer, planned)
        record.outcomes.append(judge(planned.request_class, timeline, sent_at_s=planned.at_s))
        record.wall_s = max(record.wall_s, time.monotonic() - started)

    async def kill() -> None:
        await asyncio.sleep(max(0.0, started + KILL_AT * duration_s - time.monotonic()))
        record.kill_s = time.monotonic() - started
        await mesh.kill(arm.killed_agent)
        await asyncio.sleep(RESTART_AFTER_S)
        await mesh.restart(arm.killed_agent)

    async def report() -> None:
        while True:
            await asyncio.sleep(2.0)
            progress(record)

    async with asyncio.TaskGroup() as tasks:
        killing = tasks.create_task(kill())
        reporter = tasks.create_task(report())
        await asyncio.gather(*(one(planned) for planned in workload), killing)
        reporter.cancel()
    await asyncio.sleep(STATUS_WAIT_S)
    after = totals.counts()
    record.counts = {name: after[name] - before[name] for name in after}
    return record


async def _ask(arm: Arm, producer: Producer, planned: Planned) -> Timeline:
    """Send one request, and record the times of its answer by the clock of this process."""
    timeline = Timeline()
    streamed = planned.request_class.qos_class is QosClass.INTERACTIVE
    sent = time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            generation = await producer.submit(
                arm.published(planned.body), reply=ReplyMode.STREAM if streamed else ReplyMode.FINAL
            )
            try:
                async for part in generation:
                    timeline.tokens.append((time.monotonic() - sent, len(part.token_ids)))
            except RunDivergedError:
                timeline.diverged = True
            final = await generation.final()
    except TimeoutError:
        timeline.error = "no answer"
    except MeshError as error:
        timeline.error = str(error)
    else:
        if isinstance(final, RequestCompleted):
            timeline.finished_s = time.monotonic() - sent
        else:
            timeline.error = final.error.code
    return timeline


async def send_malformed(broker: Broker) -> dict[str, bool]:
    """
    Publish malformed requests like a plain AMQP client.

    Returns:
        Name -> true if the answer was the expected error.
    """
    answers: dict[str, str] = {}
    arrived = asyncio.Event()
    decode = Decoder[RequestFailed](RequestFailed)

    async def on_reply(delivery: Delivery) -> None:
        with contextlib.suppress(ContractError):  # a reply other than `request.failed` is ignored
            answers[delivery.correlation_id or ""] = decode(delivery.body).error.code
            arrived.set()
        await delivery.settle(Settlement.ACK)

    queue, binding = topology.reply_queue(f"reply.demo-malformed.{time.time_ns()}")
    await broker.declare_queue(queue)
    await broker.bind(binding)
    subscription = await broker.consume(queue.name, on_reply, prefetch=8)
    for name, body, _ in MALFORMED:
        message = OutMessage(
            body=body.replace(b"%m", MODELS[0].encode()), message_id=name, reply_to=queue.name
        )
        await broker.publish(topology.REQUESTS, topology.REST_KEY, message)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10.0):
            while len(answers) < len(MALFORMED):
                arrived.clear()
                await arrived.wait()
    await subscription.cancel()
    await broker.delete_queue(queue.name)
    return {name: answers.get(name) == code for name, _, code in MALFORMED}
