"""Dispatch of messages by kind, and handling of errors."""

import pytest
from structlog.testing import capture_logs

from shared.broker import consumer
from shared.broker.consumer import Dispatcher, settlement_for
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.broker.protocol import (
    BindingSpec,
    Delivery,
    ExchangeSpec,
    ExchangeType,
    OutMessage,
    QueueSpec,
    Settlement,
)
from shared.contracts.base import encode
from shared.contracts.control import LaneNonempty, RequestCancel
from shared.contracts.errors import (
    BrokerUnavailableError,
    CapacityError,
    ContractError,
    EngineError,
    TransientError,
)

CANCEL = RequestCancel(request_id="r1")


@pytest.fixture
async def broker():
    async with MemoryBroker(MemoryHub()) as broker:
        await broker.declare_exchange(ExchangeSpec(name="dead", type=ExchangeType.FANOUT))
        await broker.declare_queue(QueueSpec(name="q", dead_letter_exchange="dead"))
        await broker.declare_queue(QueueSpec(name="dead-letters"))
        await broker.bind(BindingSpec(exchange="dead", queue="dead-letters", routing_key=""))
        yield broker


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(consumer, "REQUEUE_FIRST_S", 0.0)


async def handle(broker: MemoryBroker, dispatcher: Dispatcher, body: bytes) -> str:
    """Handle a message; return the queue in which the message is afterwards."""
    await broker.publish("", "q", OutMessage(body=body))
    delivery = await broker.get("q")
    assert delivery is not None
    await dispatcher.handle(delivery)
    for queue in ("q", "dead-letters"):
        depth = await broker.depth(queue)
        if depth is not None and depth.ready:
            return queue
    return "gone"


def raising(error: Exception) -> Dispatcher[None]:
    async def on_cancel(message: RequestCancel, ctx: None, delivery: Delivery) -> None:
        raise error

    return Dispatcher({RequestCancel: on_cancel}, None)


async def test_the_handler_of_the_message_type_gets_the_context(broker: MemoryBroker):
    calls = []

    async def on_cancel(message: RequestCancel, ctx: str, delivery: Delivery) -> None:
        calls.append((message, ctx, delivery.queue))

    async def on_lane(message: LaneNonempty, ctx: str, delivery: Delivery) -> None:
        raise AssertionError

    dispatcher = Dispatcher({RequestCancel: on_cancel, LaneNonempty: on_lane}, "ctx")

    assert await handle(broker, dispatcher, encode(CANCEL)) == "gone"
    assert calls == [(CANCEL, "ctx", "q")]


async def test_a_handler_may_choose_the_settlement_or_settle_itself(broker: MemoryBroker):
    async def choose(message: RequestCancel, ctx: None, delivery: Delivery) -> Settlement:
        return Settlement.REJECT

    async def settle(message: RequestCancel, ctx: None, delivery: Delivery) -> None:
        await delivery.settle(Settlement.REQUEUE)

    assert await handle(broker, Dispatcher({RequestCancel: settle}, None), encode(CANCEL)) == "q"
    await broker.purge("q")
    chosen = await handle(broker, Dispatcher({RequestCancel: choose}, None), encode(CANCEL))
    assert chosen == "dead-letters"


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (ContractError("bad"), "dead-letters"),
        (TransientError("later"), "q"),
        (BrokerUnavailableError("later"), "q"),
        (CapacityError("full", retry_after_s=1), "q"),
        (EngineError("broken"), "q"),
        (ZeroDivisionError(), "dead-letters"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
async def test_the_exception_decides_the_settlement(
    broker: MemoryBroker, error: Exception, place: str
):
    assert await handle(broker, raising(error), encode(CANCEL)) == place


async def test_unexpected_exceptions_are_logged_with_a_traceback(broker: MemoryBroker):
    with capture_logs() as logs:
        await handle(broker, raising(ZeroDivisionError()), encode(CANCEL))

    (rejected,) = [entry for entry in logs if entry["event"] == "message.rejected"]
    assert (rejected["log_level"], rejected["exc_info"].__class__) == ("error", ZeroDivisionError)


@pytest.mark.parametrize(
    ("on_unknown", "place"), [(Settlement.ACK, "gone"), (Settlement.REJECT, "dead-letters")]
)
async def test_unknown_kinds_are_settled_as_configured(
    broker: MemoryBroker, on_unknown: Settlement, place: str
):
    async def never(message: RequestCancel, ctx: None, delivery: Delivery) -> None:
        raise AssertionError

    dispatcher = Dispatcher({RequestCancel: never}, None, on_unknown=on_unknown)

    assert await handle(broker, dispatcher, b'{"kind":"request.melt.v9"}') == place


@pytest.mark.parametrize(
    "body", [b"\xff", b"{}", b'{"kind":"request.cancel.v1"}', b'{"kind":"request.cancel.v1"', b"[]"]
)
async def test_bodies_that_break_the_contract_are_rejected(broker: MemoryBroker, body: bytes):
    assert await handle(broker, raising(AssertionError()), body) == "dead-letters"


async def test_contract_errors_may_be_answered_instead(broker: MemoryBroker):
    answered = []

    async def answer(error: ContractError, ctx: None, delivery: Delivery) -> Settlement:
        answered.append((str(error), delivery.body))
        return Settlement.ACK

    async def never(message: RequestCancel, ctx: None, delivery: Delivery) -> None:
        raise AssertionError

    dispatcher = Dispatcher({RequestCancel: never}, None, on_contract_error=answer)

    assert await handle(broker, dispatcher, b'{"kind":"request.cancel.v1"}') == "gone"
    ((message, body),) = answered
    assert "request_id" in message
    assert body == b'{"kind":"request.cancel.v1"}'


def test_the_first_matching_row_determines_the_settlement():
    assert settlement_for(BrokerUnavailableError("x")) is Settlement.REQUEUE
    assert settlement_for(KeyError("x")) is Settlement.REJECT
