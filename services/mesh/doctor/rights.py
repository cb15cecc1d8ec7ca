"""Rights, alarms and policies, by objects that are made and removed again."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from services.mesh.doctor.findings import Finding, deviation, ok
from shared.broker import topology
from shared.broker.amqp.inspection import Inspection
from shared.broker.protocol import (
    BindingSpec,
    Broker,
    Delivery,
    ExchangeSpec,
    ExchangeType,
    OutMessage,
    PublishOutcome,
    Settlement,
)
from shared.contracts.errors import (
    BrokerAccessError,
    BrokerConflictError,
    BrokerUnavailableError,
    MeshError,
)

NUM_MESSAGES = 2
TTL_LOOK_S = 0.3
"""Time after which the messages must still be in the queue."""


class Trial:
    """
    Objects of one run of the doctor, with names that nothing else has.

    Args:
        broker: Client with short time limits.
        inspection: Connection of the doctor.
        exchanges: The mesh's exchanges that exist; the others are replaced by the trial's own.
    """

    def __init__(self, broker: Broker, inspection: Inspection, exchanges: frozenset[str]) -> None:
        self.broker, self.inspection, self.exchanges = broker, inspection, exchanges
        mark = f"doctor-{secrets.token_hex(4)}"
        self.exchange = ExchangeSpec(name=f"headway.{mark}", type=ExchangeType.TOPIC)
        self.work = topology.work_queue(f"relegated.{mark}")
        self.private = topology.private_queue(f"agent.{mark}")
        self.lock = topology.lock_of(self.work.name)
        self.reply, _ = topology.reply_queue(f"reply.{mark}")

    async def close(self) -> None:
        """Remove everything that the trial has made."""
        for spec in (self.work, self.private, self.lock, self.reply):
            with suppress(MeshError):
                await self.broker.delete_queue(spec.name)
        with suppress(MeshError):
            await self.inspection.delete_exchange(self.exchange.name)

    async def bind(self, queue: str, exchange: str) -> None:
        """Bind a queue of the trial to an exchange of the mesh."""
        name = exchange if exchange in self.exchanges else self.exchange.name
        await self.broker.bind(BindingSpec(exchange=name, queue=queue, routing_key=queue))

    async def read_cancels(self) -> None:
        """Begin to read the stream of cancellations, as agents do before they pull."""

        async def ignored(_delivery: Delivery) -> None: ...

        await (await self.broker.read(topology.CANCELS, ignored, prefetch=1)).cancel()

    async def publish(self) -> PublishOutcome:
        """Publish one message to the work queue."""
        lanes = topology.LANES if topology.LANES in self.exchanges else self.exchange.name
        message = OutMessage(body=b"{}", message_id=secrets.token_hex(8))
        return await self.broker.publish(lanes, self.work.name, message)


async def checked(trial: Trial) -> AsyncIterator[Finding]:
    """Findings about rights, alarms and policies."""
    try:
        refused = 0
        async for finding in _rights(trial):
            refused += 1
            yield finding
        async for finding in _messages(trial):
            yield finding
        if not refused:
            yield ok("rights", "everything that services declare, bind, publish and read works")
    finally:
        await trial.close()


Attempt = Callable[[], Awaitable[None]]


def _attempts(trial: Trial) -> tuple[tuple[str, str, Attempt], ...]:
    """What is tried, the roles that need it, and the attempt."""
    broker, work, private = trial.broker, trial.work.name, trial.private.name

    def bind(queue: str, exchange: str) -> Attempt:
        return lambda: trial.bind(queue, exchange)

    return (
        ("create an exchange", "planner", lambda: broker.declare_exchange(trial.exchange)),
        ("create a lane", "planner, agent", lambda: broker.declare_queue(trial.work)),
        ("lock a lane", "planner, agent", lambda: broker.declare_queue(trial.lock)),
        ("bind a lane", "planner, agent", bind(work, topology.LANES)),
        ("create a private queue", "all services", lambda: broker.declare_queue(trial.private)),
        ("receive control messages", "all services", bind(private, topology.CONTROL)),
        ("receive plans", "agent", bind(private, topology.PLANS)),
        ("receive profiles", "all services", bind(private, topology.PROFILES)),
        ("receive telemetry", "planner, estimator, gateway", bind(private, topology.TELEMETRY)),
        ("read cancellations", "agent", trial.read_cancels),
        ("create a reply queue", "gateway, producers", lambda: broker.declare_queue(trial.reply)),
        ("bind a reply queue", "gateway, producers", bind(trial.reply.name, topology.REPLIES)),
    )


async def _rights(trial: Trial) -> AsyncIterator[Finding]:
    for what, roles, attempt in _attempts(trial):
        try:
            await attempt()
        except BrokerAccessError as error:
            yield deviation(
                "rights",
                f"the user may not {what}: {error}",
                so=f"needed by: {roles}",
                do="grant configure, write and read on '.*' of the virtual host, or the rights "
                "per role of ops/docs/broker.md",
            )
        except MeshError:  # it follows from an earlier refusal
            continue


async def _messages(trial: Trial) -> AsyncIterator[Finding]:
    """Publish two messages, look whether they stay, and read them."""
    try:
        outcomes = [await trial.publish() for _ in range(NUM_MESSAGES)]
    except BrokerUnavailableError as error:
        yield deviation(
            "alarms",
            f"the broker confirms no message: {error}",
            so="nothing is published, so no request is accepted and no answer delivered",
            do="look for a memory or disk alarm: `rabbitmq-diagnostics alarms`",
        )
        return
    except BrokerConflictError as error:
        yield deviation(
            "rights",
            f"the user may not publish to lanes: {error}",
            so="needed by: planner, agent",
            do=f"grant write on {topology.LANES}",
        )
        return
    yield ok("alarms", "messages are confirmed")
    await asyncio.sleep(TTL_LOOK_S)
    depth = await trial.broker.depth(trial.work.name)
    ready = 0 if depth is None else depth.ready
    if outcomes != [PublishOutcome.CONFIRMED] * NUM_MESSAGES or ready != NUM_MESSAGES:
        words = ", ".join(each.value for each in outcomes)
        yield deviation(
            "policies",
            f"{NUM_MESSAGES} messages to a lane were {words}, and {ready} remained",
            so="a policy limits, expires or moves the messages of lanes: requests are lost",
            do="exclude the queues and exchanges of Headway from the policy; see "
            "`rabbitmqctl list_policies` and `list_operator_policies`",
        )
    else:
        yield ok("policies", "messages stay in lanes; other policies cannot be seen over AMQP")
    try:
        while (delivery := await trial.broker.get(trial.work.name)) is not None:
            await delivery.settle(Settlement.ACK)
    except MeshError as error:
        yield deviation(
            "rights",
            f"the user may not read lanes: {error}",
            so="needed by: agent",
            do="grant read on lanes",
        )
