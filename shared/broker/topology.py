"""
Every exchange and queue of the mesh, in one table.

`ops/rabbitmq/definitions.json` is generated from here; queue names occur nowhere else.
"""

import secrets
from contextlib import suppress
from dataclasses import replace

from shared.broker.protocol import (
    BindingSpec,
    Broker,
    ExchangeSpec,
    ExchangeType,
    QueueSpec,
    QueueType,
)
from shared.contracts.errors import BrokerAccessError

REQUESTS = "headway.requests"
"""Where producers publish. Routing key `interactive` or `interactive.*` for the fast queue."""
REQUESTS_REST = "headway.requests.rest"
LANES = "headway.lanes"
REPLIES = "headway.replies"
"""Producers bind their reply queue here, under its own name."""
CONTROL = "headway.control"
TELEMETRY = "headway.telemetry"
PLANS = "headway.plans"
PROFILES = "headway.profiles"
DEAD = "headway.dead"
UNCLAIMED = "headway.unclaimed"

GLOBAL_INTERACTIVE = "headway.global.interactive"
GLOBAL_REST = "headway.global.rest"
LEADER = "headway.leader"
ESTIMATOR = "headway.estimator"
DEAD_LETTERS = "headway.dead-letters"
"""What could not be served, for people: each with a `headway-reason` or the broker's reason."""
OBITUARIES = "headway.obituaries"
"""The same messages, for groupers, which tell the producers of those that the broker buried."""
UNCLAIMED_FINALS = "headway.unclaimed-finals"

INTERACTIVE_KEY = "interactive"
REST_KEY = "rest"

DELIVERY_LIMIT = 20
"""Backstop only: on 3.10 the order after a requeue depends on a limit being set, and 4.x
drops after 20 silently without a dead-letter exchange. Poison is found by crash counts."""
KEPT_LIMIT = 1_000_000
"""For queues that people look into: 4.x drops a message after 20 looks without a limit."""
REASON_HEADER = "headway-reason"
"""Why a service buried a message; set by the service, which has told the producer itself."""
REPLY_MAX_BYTES = 256 * 1024 * 1024
REPLY_EXPIRES_S = 600.0
UNCLAIMED_TTL_S = 7 * 24 * 3600.0
"""Finals that nobody collected are dropped after this, by a policy of the broker."""
GLOBAL_MAX_BYTES = 8 * 1024**3

EXCHANGES: tuple[ExchangeSpec, ...] = (
    ExchangeSpec(name=REQUESTS_REST, type=ExchangeType.FANOUT),
    ExchangeSpec(name=REQUESTS, type=ExchangeType.TOPIC, alternate=REQUESTS_REST),
    ExchangeSpec(name=LANES, type=ExchangeType.DIRECT),
    ExchangeSpec(name=REPLIES, type=ExchangeType.DIRECT),
    ExchangeSpec(name=CONTROL, type=ExchangeType.TOPIC),
    ExchangeSpec(name=TELEMETRY, type=ExchangeType.TOPIC),
    ExchangeSpec(name=PLANS, type=ExchangeType.DIRECT),
    ExchangeSpec(name=PROFILES, type=ExchangeType.FANOUT),
    ExchangeSpec(name=DEAD, type=ExchangeType.FANOUT),
    ExchangeSpec(name=UNCLAIMED, type=ExchangeType.FANOUT),
)

_WORK = QueueSpec(name="", delivery_limit=DELIVERY_LIMIT, dead_letter_exchange=DEAD)

QUEUES: tuple[QueueSpec, ...] = (
    replace(_WORK, name=GLOBAL_INTERACTIVE, max_length_bytes=GLOBAL_MAX_BYTES),
    replace(_WORK, name=GLOBAL_REST, max_length_bytes=GLOBAL_MAX_BYTES),
    QueueSpec(
        name=LEADER,
        single_active_consumer=True,
        delivery_limit=KEPT_LIMIT,
        max_length=20_000,
        drop_head=True,
    ),
    QueueSpec(name=ESTIMATOR, type=QueueType.CLASSIC, max_length=100_000, drop_head=True),
    QueueSpec(name=OBITUARIES, delivery_limit=KEPT_LIMIT),
    QueueSpec(
        name=DEAD_LETTERS,
        delivery_limit=KEPT_LIMIT,
        max_length_bytes=GLOBAL_MAX_BYTES,
        drop_head=True,
    ),
    QueueSpec(
        name=UNCLAIMED_FINALS, type=QueueType.CLASSIC, max_length_bytes=1024**3, drop_head=True
    ),
)

BINDINGS: tuple[BindingSpec, ...] = (
    BindingSpec(exchange=REQUESTS, queue=GLOBAL_INTERACTIVE, routing_key="interactive.#"),
    BindingSpec(exchange=REQUESTS_REST, queue=GLOBAL_REST, routing_key=""),
    BindingSpec(exchange=TELEMETRY, queue=LEADER, routing_key="status.#"),
    BindingSpec(exchange=TELEMETRY, queue=LEADER, routing_key="lanes.#"),
    BindingSpec(exchange=TELEMETRY, queue=LEADER, routing_key="alarm.#"),
    BindingSpec(exchange=TELEMETRY, queue=LEADER, routing_key="tick.#"),
    BindingSpec(exchange=TELEMETRY, queue=ESTIMATOR, routing_key="observed.#"),
    BindingSpec(exchange=TELEMETRY, queue=ESTIMATOR, routing_key="status.#"),
    BindingSpec(exchange=DEAD, queue=DEAD_LETTERS, routing_key=""),
    BindingSpec(exchange=DEAD, queue=OBITUARIES, routing_key=""),
    BindingSpec(exchange=UNCLAIMED, queue=UNCLAIMED_FINALS, routing_key=""),
)


async def declare(broker: Broker) -> None:
    """
    Create every exchange, queue and binding of the table; harmless when they exist.

    A user without the right to is one of `ops/rabbitmq/definitions.json`, which created them.
    """
    with suppress(BrokerAccessError):
        for exchange in EXCHANGES:
            await broker.declare_exchange(exchange)
        for queue in QUEUES:
            await broker.declare_queue(queue)
        for binding in BINDINGS:
            await broker.bind(binding)


def work_queue(name: str) -> QueueSpec:
    """
    A lane, a lane's companion or an inbox: durable, counted, dead-lettering.

    Differs from an expiring queue: RabbitMQ's expiry deletes messages that wait, and lanes are
    read by `basic.get`, which is no consumer. Lanes of the current layout stay, those of an
    older one are unbound, drained and deleted by the leader.
    """
    return replace(_WORK, name=name)


async def declare_work_queue(broker: Broker, name: str) -> None:
    """Create a work queue and its binding under its own name on `headway.lanes`."""
    await broker.declare_queue(work_queue(name))
    await broker.bind(_work_binding(name))


async def close_work_queue(broker: Broker, name: str) -> None:
    """Unbind a work queue: publishes to it are unroutable, what is in it stays."""
    await broker.unbind(_work_binding(name))


def _work_binding(name: str) -> BindingSpec:
    return BindingSpec(exchange=LANES, queue=name, routing_key=name)


def plan_queue(instance_id: str, client: str) -> tuple[QueueSpec, BindingSpec]:
    """Last plan wins: one message, the oldest dropped. *client* is unique per process."""
    name = f"plan.{client}"
    return (
        QueueSpec(
            name=name,
            type=QueueType.CLASSIC,
            durable=False,
            exclusive=True,
            max_length=1,
            drop_head=True,
        ),
        BindingSpec(exchange=PLANS, queue=name, routing_key=instance_id),
    )


def private_queue(name: str, *, max_length: int = 10_000) -> QueueSpec:
    """A queue of one process: control notices, profiles. Soft state, bounded, drop-head."""
    return QueueSpec(
        name=name,
        type=QueueType.CLASSIC,
        durable=False,
        exclusive=True,
        max_length=max_length,
        drop_head=True,
    )


def claim_queue(model: str) -> QueueSpec:
    """
    Whoever has it may bring *model* up without a plan; nobody puts anything into it.

    Exclusive, so that it goes with a connection that goes, and forgotten after two minutes.
    """
    return QueueSpec(
        name=f"agent-claim.{model}",
        type=QueueType.CLASSIC,
        durable=False,
        exclusive=True,
        expires_s=120.0,
    )


def passing_queue(purpose: str) -> QueueSpec:
    """A private queue of one command, under a name that no other process has."""
    return private_queue(f"{purpose}.{secrets.token_hex(8)}")


def answer_queue() -> tuple[QueueSpec, BindingSpec]:
    """Where one command waits for its answer; gone with its connection."""
    queue = passing_queue("answer")
    return queue, BindingSpec(exchange=REPLIES, queue=queue.name, routing_key=queue.name)


def reply_queue(name: str) -> tuple[QueueSpec, BindingSpec]:
    """
    A producer's replies. Durable, so that it survives a reconnect; bounded with drop-head,
    which is harmless since finals are complete.
    """
    return (
        QueueSpec(
            name=name,
            type=QueueType.CLASSIC,
            max_length_bytes=REPLY_MAX_BYTES,
            drop_head=True,
            expires_s=REPLY_EXPIRES_S,
        ),
        BindingSpec(exchange=REPLIES, queue=name, routing_key=name),
    )


def control_keys(instance_id: str | None = None) -> tuple[str, ...]:
    """Routing keys on `headway.control` that a service listens to."""
    if instance_id is None:
        return ("all.#",)
    return ("all.#", control_instance(instance_id), command_instance(instance_id))


CONTROL_ALL = "all"
CONTROL_LANE = "all.lane"
CONTROL_CANCEL = "all.cancel"
CONTROL_PLAN = "plan.asked"


def control_instance(instance_id: str) -> str:
    """Routing key of what producers may tell one instance: to stop a run."""
    return f"instance.{instance_id}"


def command_instance(instance_id: str) -> str:
    """Routing key of operators' commands to one instance; producers have no right to it."""
    return f"command.{instance_id}"


STATUS_KEYS = "status.#"
"""Of all instances."""


def status_key(instance_id: str) -> str:
    return f"status.{instance_id}"


OBSERVED_ENGINE_KEY = "observed.engine"
OBSERVED_REQUEST_KEY = "observed.request"
PREFILLS_KEY = "prefills.agent"
OBSERVED_SAMPLES_KEY = "observed.samples"
ROUTER_KEY = "router.state"
LANES_KEY = "lanes.grouper"
ALARM_KEY = "alarm.estimator"
FORECAST_KEY = "forecast.leader"
LAYOUT_KEY = "layout.leader"
TICK_KEY = "tick.planner"


def plan_key(instance_id: str) -> str:
    """Copies of plans for onlookers, on `headway.telemetry`; agents read `headway.plans`."""
    return f"plan.{instance_id}"
