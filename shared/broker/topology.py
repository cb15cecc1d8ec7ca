"""
All exchanges and queues of the mesh, in one table.

`ops/rabbitmq/definitions.json` is generated from the table; no other code defines queue names.
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
from shared.contracts.errors import (
    BrokerAccessError,
    BrokerUnavailableError,
    QueueDownError,
)
from shared.contracts.qos import MAX_TARGET_S

REQUESTS = "headway.requests"
"""
Exchange to which producers publish.

The routing keys `interactive` and `interactive.*` select the fast queue.
"""
REQUESTS_REST = "headway.requests.rest"
LANES = "headway.lanes"
REPLIES = "headway.replies"
"""Exchange of replies. A producer binds its reply queue here under the queue's own name."""
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
TENANTS = "headway.tenants"
"""Demands of groupers; its active consumer shares the limits of tenants among all groupers."""
USAGE = "headway.usage"
"""What finals count for their tenants; its active consumer keeps the usage."""
DEAD_LETTERS = "headway.dead-letters"
"""Failed messages for inspection, each with the header `headway-reason` or the broker's reason."""
DEAD_LETTER_REPLIES = "headway.dead-letter-replies"
"""Exchange for copies of dead letters, for which groupers send dead-letter replies to producers."""
HELD = "headway.held"
"""Requests that come back from delay queues, and are grouped or held again by groupers."""
UNCLAIMED_FINALS = "headway.unclaimed-finals"
STORED = "headway.stored"
"""Replies of stored work, bound to `REPLIES` as a reply queue; groupers write them to the store."""
QUESTIONS = "headway.questions"
"""Questions about stored requests, which groupers answer; unanswered ones are dropped."""
CANCELS = "headway.cancels"
"""Stream of cancellations, from which agents that start learn which requests must not begin."""
WORK_QUEUES = "headway.work-queues"
"""Names of the work queues that exist, for new leaders (`shared/broker/queue_list.py`)."""

INTERACTIVE_KEY = "interactive"
REST_KEY = "rest"
CONTROL_CANCEL = "all.cancel"
COMMAND_CANCEL = "command.cancel"
"""Routing key of cancellations by tenant and id; producers have no permission for this key."""
CONTROL_REQUEST = "request.asked"
"""Routing key of questions about stored requests."""

DELIVERY_LIMIT = 20
"""
Delivery limit of work queues. Crash counts detect poison requests earlier, so the limit is only a
second protection.

RabbitMQ 3.10 keeps the order after a requeue only with a limit. Without one, RabbitMQ 4.x drops a
message after 20 deliveries, silently if the queue has no dead-letter exchange.
"""
KEPT_LIMIT = 1_000_000
"""
Delivery limit of queues that operators inspect.

Without a limit, RabbitMQ 4.x drops a message after 20 reads.
"""
TENANT_HEADER = "headway-tenant"
"""Header of replies to `STORED`: the tenant of the request, since tenants may have equal ids."""
REASON_HEADER = "headway-reason"
"""Header with a service's reason for a dead letter; the service has notified the producer."""
QUEUE_HEADER = "headway-queue"
"""Header with the queue in which a dead letter was."""
REPLY_MAX_BYTES = 256 * 1024 * 1024
REPLY_EXPIRES_S = 600.0
UNCLAIMED_TTL_S = 7 * 24 * 3600.0
"""Age at which a broker policy drops finals that no producer collected."""
GLOBAL_MAX_BYTES = 8 * 1024**3
QUESTION_TTL_S = 10.0
"""Age at which a question is dropped: the sender does not wait for longer."""

CANCELS_MAX_BYTES = 32 * 1024**2
"""
Size of the kept cancellations, of which each has about 350 bytes with its properties. An agent that
starts reads all of them.
"""
CANCELS_MAX_AGE_S = MAX_TARGET_S
"""Age at which cancellations are dropped: no request with a target or an end waits for longer."""
CANCELS_MARK = "cancels.marked"
"""Routing key of the marks by which agents know that they have read what was sent before."""

DELAYS_MS: tuple[int, ...] = tuple(250 * 2**n for n in range(19))
"""
Times for which delay queues keep requests that must not begin yet: 250 ms to 18 hours. A request
passes through several of them, each at most as long as the rest of its time.
"""

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
    QueueSpec(
        name=TENANTS,
        single_active_consumer=True,
        delivery_limit=KEPT_LIMIT,
        max_length=1_000,
        drop_head=True,
    ),
    QueueSpec(
        name=USAGE,
        single_active_consumer=True,
        delivery_limit=KEPT_LIMIT,
        max_length_bytes=GLOBAL_MAX_BYTES,
        drop_head=True,
    ),
    QueueSpec(name=WORK_QUEUES, delivery_limit=KEPT_LIMIT),
    replace(_WORK, name=HELD),
    QueueSpec(name=DEAD_LETTER_REPLIES, delivery_limit=KEPT_LIMIT),
    QueueSpec(name=STORED, delivery_limit=KEPT_LIMIT),
    QueueSpec(
        name=QUESTIONS,
        type=QueueType.CLASSIC,
        max_length=10_000,
        drop_head=True,
        message_ttl_s=QUESTION_TTL_S,
    ),
    QueueSpec(
        name=CANCELS,
        type=QueueType.STREAM,
        max_length_bytes=CANCELS_MAX_BYTES,
        max_age_s=CANCELS_MAX_AGE_S,
        segment_bytes=CANCELS_MAX_BYTES // 16,
    ),
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
    BindingSpec(exchange=TELEMETRY, queue=TENANTS, routing_key="demand.#"),
    BindingSpec(exchange=TELEMETRY, queue=USAGE, routing_key="metered.#"),
    BindingSpec(exchange=LANES, queue=WORK_QUEUES, routing_key=WORK_QUEUES),
    BindingSpec(exchange=LANES, queue=HELD, routing_key=HELD),
    BindingSpec(exchange=REPLIES, queue=STORED, routing_key=STORED),
    BindingSpec(exchange=CONTROL, queue=QUESTIONS, routing_key=CONTROL_REQUEST),
    BindingSpec(exchange=CONTROL, queue=CANCELS, routing_key=CONTROL_CANCEL),
    BindingSpec(exchange=CONTROL, queue=CANCELS, routing_key=COMMAND_CANCEL),
    BindingSpec(exchange=CONTROL, queue=CANCELS, routing_key=CANCELS_MARK),
    BindingSpec(exchange=DEAD, queue=DEAD_LETTERS, routing_key=""),
    BindingSpec(exchange=DEAD, queue=DEAD_LETTER_REPLIES, routing_key=""),
    BindingSpec(exchange=UNCLAIMED, queue=UNCLAIMED_FINALS, routing_key=""),
)


DELAY_QUEUES: tuple[QueueSpec, ...] = tuple(
    QueueSpec(
        name=f"headway.delay.{delay_ms}",
        delivery_limit=KEPT_LIMIT,
        dead_letter_exchange=LANES,
        dead_letter_routing_key=HELD,
        message_ttl_s=delay_ms / 1000,
    )
    for delay_ms in DELAYS_MS
)
"""
Queues without consumers: each keeps a message for its time, and then moves it to `HELD`. The
first request that is held creates the queues that it needs; a definitions file has all of them.
"""
DELAY_BINDINGS: tuple[BindingSpec, ...] = tuple(
    BindingSpec(exchange=LANES, queue=queue.name, routing_key=queue.name) for queue in DELAY_QUEUES
)


async def declare(broker: Broker) -> None:
    """
    Create every exchange, queue and binding of the mesh; idempotent.

    Skips classic queues whose node is down: they come back with it.

    Does nothing if the user may not declare them: an operator must then import
    `ops/rabbitmq/definitions.json`.
    """
    with suppress(BrokerAccessError):
        for exchange in EXCHANGES:
            await broker.declare_exchange(exchange)
        # RabbitMQ 4 does not answer for a minute about a queue whose node is down.
        down = BrokerUnavailableError if broker.has_several_nodes else QueueDownError
        on_one_node = {queue.name for queue in QUEUES if queue.type is QueueType.CLASSIC}
        for queue in QUEUES:
            with suppress(*([down] if queue.name in on_one_node else [])):
                await broker.declare_queue(queue)
        for binding in BINDINGS:
            with suppress(*([down] if binding.queue in on_one_node else [])):
                await broker.bind(binding)


def delay_queue(left_s: float) -> QueueSpec:
    """The queue of the longest delay that is at most *left_s*; the shortest one if none is."""
    fitting = [queue for queue in DELAY_QUEUES if (queue.message_ttl_s or 0.0) <= left_s]
    return fitting[-1] if fitting else DELAY_QUEUES[0]


async def declare_delay_queue(broker: Broker, queue: QueueSpec) -> None:
    """Create one of `DELAY_QUEUES`, and bind it under its own name to `headway.lanes`."""
    await broker.declare_queue(queue)
    await broker.bind(BindingSpec(exchange=LANES, queue=queue.name, routing_key=queue.name))


def work_queue(name: str) -> QueueSpec:
    """
    Spec of a lane, companion queue or inbox: durable, with a delivery limit and dead-lettering.

    These queues do not expire: lanes are read by `basic.get`, which does not count as use, and
    RabbitMQ's expiry would delete waiting messages. Lanes of the current layout are kept. The
    leader unbinds, drains and deletes lanes of older layouts.
    """
    return replace(_WORK, name=name)


async def declare_work_queue(broker: Broker, name: str) -> None:
    """Create a work queue, and bind it under its own name to `headway.lanes`."""
    await broker.declare_queue(work_queue(name))
    await broker.bind(_work_binding(name))


async def close_work_queue(broker: Broker, name: str) -> None:
    """Unbind a work queue: later publishes to it are unroutable, and its messages remain."""
    await broker.unbind(_work_binding(name))


def _work_binding(name: str) -> BindingSpec:
    return BindingSpec(exchange=LANES, queue=name, routing_key=name)


def plan_queue(instance_id: str, client: str) -> tuple[QueueSpec, BindingSpec]:
    """
    Queue that holds only the last plan: at most one message; a new one replaces the old one.

    *client* must be unique per process.
    """
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
    """
    Bounded queue of one process for control notices or profiles; a full queue drops the oldest
    message.
    """
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
    Queue without messages that serves as a lock: its owner may activate *model* without a plan.

    The queue is exclusive, so it is deleted with the owner's connection; it expires after two
    minutes.
    """
    return QueueSpec(
        name=f"agent-claim.{model}",
        type=QueueType.CLASSIC,
        durable=False,
        exclusive=True,
        expires_s=120.0,
    )


def server_claim(server: str) -> QueueSpec:
    """
    Queue without messages that serves as a lock: its owner alone serves with a server of others.

    Args:
        server: Name of the server, made of its address.
    """
    return QueueSpec(
        name=f"agent-claim.server.{server}",
        type=QueueType.CLASSIC,
        durable=False,
        exclusive=True,
    )


def instance_claim(instance_id: str) -> QueueSpec:
    """
    Queue without messages that serves as a lock: its owner alone is the instance with this id. It
    is deleted with the owner's connection.
    """
    return QueueSpec(
        name=f"agent-claim.instance.{instance_id}",
        type=QueueType.CLASSIC,
        durable=False,
        exclusive=True,
    )


def lock_of(queue: str) -> QueueSpec:
    """
    Queue that serves as the lock of a work queue: its owner may create or delete the work queue.

    The lock queue never holds messages. It is exclusive, so it ends with the owner's connection,
    and it expires after two minutes.
    """
    return QueueSpec(
        name=f"lock.{queue}",
        type=QueueType.CLASSIC,
        durable=False,
        exclusive=True,
        expires_s=120.0,
    )


def temporary_queue(purpose: str) -> QueueSpec:
    """Private queue of one command; the queue has a unique name."""
    return private_queue(f"{purpose}.{secrets.token_hex(8)}")


def reply_queue(name: str) -> tuple[QueueSpec, BindingSpec]:
    """
    Reply queue of a producer.

    It is durable, so that it survives a reconnect. It is bounded and drops the oldest messages,
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


def replicated_reply_queue(name: str) -> tuple[QueueSpec, BindingSpec]:
    """
    Reply queue on several nodes of a broker, so that it survives the loss of one; each message
    costs more.
    """
    queue, binding = reply_queue(name)
    return replace(queue, type=QueueType.QUORUM, delivery_limit=KEPT_LIMIT), binding


def control_keys(instance_id: str | None = None) -> tuple[str, ...]:
    """Routing keys on `headway.control` to which a service binds its queue."""
    if instance_id is None:
        return ("all.#",)
    of_instance = control_instance(instance_id), command_instance(instance_id)
    return ("all.#", COMMAND_CANCEL, *of_instance)


CONTROL_LANE = "all.lane"
CONTROL_RETIREMENT = "all.retirement"
"""Routing key of notices that queues are about to be retired or that a retirement has ended."""
CONTROL_GATEWAYS = "all.gateways"
"""Routing key of the gateways' reports about their models."""
CONTROL_PLAN = "plan.asked"
CONTROL_USAGE = "usage.asked"
"""Routing key of questions about the usage of tenants."""
CONTROL_STORIES = "stories.asked"
"""Routing key of questions about finished requests."""


def control_instance(instance_id: str) -> str:
    """Routing key of producers' commands to one instance; these commands stop runs."""
    return f"instance.{instance_id}"


def command_instance(instance_id: str) -> str:
    """
    Routing key of operators' commands to one instance; producers have no permission for this key.
    """
    return f"command.{instance_id}"


STATUS_KEYS = "status.#"
"""Routing keys of the status messages of all instances."""


def status_key(instance_id: str) -> str:
    return f"status.{instance_id}"


OBSERVED_ENGINE_KEY = "observed.engine"
OBSERVED_REQUEST_KEY = "observed.request"
PREFILLS_KEY = "prefills.agent"
OBSERVED_SAMPLES_KEY = "observed.samples"
LSO_KEY = "lso.executed"
ROUTER_KEY = "router.state"
LANES_KEY = "lanes.grouper"
LANES_PULLED_KEY = "lanes.agent"
ALARM_KEY = "alarm.estimator"
FORECAST_KEY = "forecast.leader"
TICK_KEY = "tick.planner"
EXPIRED_KEY = "expired.grouper"
"""Routing key of groupers' notices about requests that they have ended."""
TENANT_DEMAND_KEY = "demand.tenants"
TENANT_GRANTS_KEY = "grants.tenants"
METERED_KEY = "metered.request"
USAGE_TODAY_KEY = "usage.today"
STORIES_KEY = "stories.ended"
"""Routing key of the records of finished requests."""


def plan_key(instance_id: str) -> str:
    """Routing key of an instance's plan on `headway.telemetry`; agents read `headway.plans`."""
    return f"plan.{instance_id}"
