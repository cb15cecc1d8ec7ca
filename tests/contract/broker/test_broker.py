"""
Publishing, routing and declaring on every `Broker`, RabbitMQ and in-process alike.

RabbitMQ's behaviour is the reference. Acks have no answer, so tests poll counts instead of
reading them once.
"""

import asyncio
from dataclasses import replace

import pytest

from shared.broker.protocol import (
    BindingSpec,
    ExchangeSpec,
    ExchangeType,
    OutMessage,
    PublishOutcome,
    QueueSpec,
    QueueType,
    Settlement,
)
from shared.contracts.errors import (
    BrokerAccessError,
    BrokerConflictError,
    QueueNotFoundError,
)
from tests.brokers import BrokerRig
from tests.contract.broker.broker_steps import (
    CLASSIC,
    DEAD,
    WORK,
    declare,
    declare_dead,
    publish,
    take,
    take_bodies,
    wait_ready,
)


async def test_a_message_arrives_as_published(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    message = OutMessage(
        body=b"\x00body",
        kind="kind.v1",
        message_id="id",
        correlation_id="correlation",
        reply_to="reply.me",
        headers={"text": "t", "whole": 7, "real": 0.5, "flag": True},
        user_id="guest",
    )

    outcome = await broker.publish("x", "work", message)
    got = await take(broker, "work")

    assert outcome is PublishOutcome.CONFIRMED
    assert (
        got.body,
        got.kind,
        got.queue,
        got.routing_key,
    ) == (b"\x00body", "kind.v1", "work", "work")
    assert (
        got.message_id,
        got.correlation_id,
        got.reply_to,
        got.user_id,
    ) == ("id", "correlation", "reply.me", "guest")
    assert {"text": "t", "whole": 7, "real": 0.5, "flag": True}.items() <= got.headers.items()
    assert (got.redelivered, got.delivery_count) == (False, 0)


async def test_messages_arrive_in_order(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", *"abcde")

    assert list("abcde") == await take_bodies(broker, "work", 5)


async def test_unroutable_messages_are_reported_and_not_kept(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)

    assert await publish(broker, "absent", "a") == [PublishOutcome.UNROUTABLE]


async def test_concurrent_publishes_of_one_message_id_get_own_outcomes(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    message = OutMessage(body=b"a", message_id="same")

    outcomes = await asyncio.gather(
        *(broker.publish("x", key, message) for key in ("work", "absent", "work", "absent"))
    )

    yes, no = PublishOutcome.CONFIRMED, PublishOutcome.UNROUTABLE
    assert [yes, no, yes, no] == outcomes


async def test_publish_to_a_missing_exchange_fails_without_side_effects(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)

    results = await asyncio.gather(
        broker.publish("x", "work", OutMessage(body=b"a", message_id="1")),
        broker.publish("missing", "work", OutMessage(body=b"b", message_id="2")),
        broker.publish("x", "work", OutMessage(body=b"c", message_id="3")),
        return_exceptions=True,
    )

    assert PublishOutcome.CONFIRMED is results[0] is results[2]
    assert isinstance(results[1], BrokerConflictError)


async def test_a_forged_user_id_is_refused(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)

    with pytest.raises(BrokerAccessError):
        await broker.publish("x", "work", OutMessage(body=b"a", user_id="another-user"))


async def test_send_is_unconfirmed_and_drops_unroutable_messages(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, CLASSIC)

    await broker.send("x", "absent", OutMessage(body=b"lost", persistent=False))
    await broker.send("x", "classic", OutMessage(body=b"a", persistent=False))

    assert await take_bodies(broker, "classic", 1) == ["a"]


async def test_messages_that_were_sent_precede_later_publishes(broker_rig: BrokerRig):
    """Without the wait, RabbitMQ sometimes changes the order of a pair."""
    broker = await broker_rig.connect()
    await declare(broker, CLASSIC, replace(CLASSIC, name="others"))
    large = OutMessage(body=b"sent" + bytes(2000), persistent=False)
    bodies: list[str] = []

    for _ in range(100):
        for queue in (*["others"] * 5, "classic"):
            await broker.send("x", queue, large)
        await broker.flush_sent()
        await broker.publish("x", "classic", OutMessage(body=b"published", persistent=False))
        bodies += await take_bodies(broker, "classic", 2)

    assert [each.strip("\0") for each in bodies] == ["sent", "published"] * 100


async def test_topic_bindings_match_words(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await broker.declare_exchange(ExchangeSpec(name="t", type=ExchangeType.TOPIC))
    patterns = {"one": "a.*", "any": "a.#", "middle": "#.z", "all": "#", "exact": "a.b"}
    for name, pattern in patterns.items():
        await broker.declare_queue(replace(CLASSIC, name=name))
        await broker.bind(BindingSpec(exchange="t", queue=name, routing_key=pattern))
    expected = {
        "a.b": {"one", "any", "all", "exact"},
        "a": {"any", "all"},
        "a.b.z": {"any", "middle", "all"},
        "z": {"middle", "all"},
        "b": {"all"},
    }

    for key, queues in expected.items():
        await broker.publish("t", key, OutMessage(body=key.encode()))
        got = {name for name in patterns if (await broker.get(name)) is not None}
        assert (key, queues) == (key, got)


async def test_a_message_reaches_a_queue_once_despite_several_bindings(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, CLASSIC)
    await broker.bind(BindingSpec(exchange="dead", queue="classic", routing_key="1"))
    await broker.bind(BindingSpec(exchange="dead", queue="classic", routing_key="2"))
    await broker.publish("dead", "any", OutMessage(body=b"a"))

    await wait_ready(broker, "classic", 1)


async def test_an_alternate_exchange_takes_unroutable_messages(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK, CLASSIC)
    await broker.declare_exchange(
        ExchangeSpec(name="main", type=ExchangeType.TOPIC, alternate="dead")
    )
    await broker.bind(BindingSpec(exchange="main", queue="work", routing_key="work.#"))
    await broker.bind(BindingSpec(exchange="dead", queue="classic", routing_key=""))
    for key in ("work.a", "else"):
        assert PublishOutcome.CONFIRMED is await broker.publish(
            "main", key, OutMessage(body=key.encode())
        )

    assert await take_bodies(broker, "work", 1) == ["work.a"]
    assert await take_bodies(broker, "classic", 1) == ["else"]


async def test_unbinding_stops_the_flow_and_is_idempotent(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    binding = BindingSpec(exchange="x", queue="work", routing_key="work")
    await broker.unbind(binding)
    await broker.unbind(binding)

    assert await publish(broker, "work", "a") == [PublishOutcome.UNROUTABLE]


async def test_binding_a_missing_queue_is_an_error(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)

    with pytest.raises(QueueNotFoundError):
        await broker.bind(BindingSpec(exchange="missing", queue="work", routing_key="k"))
    with pytest.raises(QueueNotFoundError):
        await broker.bind(BindingSpec(exchange="x", queue="missing", routing_key="k"))


async def test_redeclaring_is_harmless_unless_the_spec_differs(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await declare(broker, WORK)

    with pytest.raises(BrokerConflictError):
        await broker.declare_queue(replace(WORK, max_length=1))
    with pytest.raises(BrokerConflictError):
        await broker.declare_exchange(ExchangeSpec(name="x", type=ExchangeType.TOPIC))


@pytest.mark.parametrize(
    "spec",
    [
        QueueSpec(name=""),
        QueueSpec(name="q", exclusive=True),
        QueueSpec(name="q", durable=False),
        QueueSpec(name="q", type=QueueType.CLASSIC, delivery_limit=1),
        QueueSpec(name="q", type=QueueType.CLASSIC, durable=False),
    ],
    ids=["nameless", "exclusive quorum", "transient quorum", "counting classic", "transient"],
)
async def test_impossible_queues_are_refused(broker_rig: BrokerRig, spec: QueueSpec):
    broker = await broker_rig.connect()

    with pytest.raises(ValueError, match="queue"):
        await broker.declare_queue(spec)


async def test_purge_drops_ready_messages(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await publish(broker, "work", "a", "b", "c")
    held = await take(broker, "work")

    assert await broker.purge("work") == 2
    await held.settle(Settlement.REQUEUE)
    assert await take_bodies(broker, "work", 1) == ["a"]
    with pytest.raises(QueueNotFoundError):
        await broker.purge("missing")


async def test_deleting_a_queue_drops_messages_and_is_idempotent(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    await declare_dead(broker)
    await publish(broker, "work", "a")
    held = await take(broker, "work")
    await publish(broker, "work", "b")
    await broker.delete_queue("work")
    await broker.delete_queue("work")

    assert (await broker.depth("work"), await broker.get(DEAD.name)) == (None, None)
    assert await held.settle(Settlement.ACK) is True
    assert await publish(broker, "work", "c") == [PublishOutcome.UNROUTABLE]


async def test_publishes_from_many_tasks_are_all_confirmed_once(broker_rig: BrokerRig):
    broker = await broker_rig.connect()
    await declare(broker, WORK)
    bodies = [str(n) for n in range(200)]

    outcomes = await asyncio.gather(
        *(broker.publish("x", "work", OutMessage(body=b.encode(), message_id=b)) for b in bodies)
    )

    assert {PublishOutcome.CONFIRMED} == set(outcomes)
    assert sorted(bodies) == sorted(await take_bodies(broker, "work", 200))
