"""Deliveries that an agent has pulled."""

from types import SimpleNamespace
from typing import Any, cast

from services.agent.deliveries import Deliveries
from shared.broker.protocol import Broker, Delivery
from shared.contracts.base import encode
from solver.instance import events as ev
from tests.clocks import FakeClock
from tests.deliveries import LooseDelivery
from tests.queued import a_request

LANE = "lane.2.tiny-llama.high.12.w0"


class Queue:
    """A broker with one delivery."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    async def get(self, _queue: str) -> Delivery | None:
        return self._delivery


def deliveries_of(delivery: Delivery) -> Deliveries:
    log = SimpleNamespace(waited=lambda *_, **__: None)
    departures = SimpleNamespace(renewal_of=lambda _delivery: None)
    return Deliveries(
        broker=cast("Broker", Queue(delivery)),
        departures=cast("Any", departures),
        request_log=cast("Any", log),
        clock=FakeClock(),
    )


async def test_a_delivery_that_is_returned_before_it_is_read_is_not_served() -> None:
    """Its connection is lost: the broker gives it to another instance."""
    for has_returned in (False, True):
        body = encode(a_request("r", lane=LANE))
        delivery = LooseDelivery(body=body, has_returned=lambda gone=has_returned: gone)
        pulled = await deliveries_of(delivery).pull(LANE)

        if has_returned:
            assert isinstance(pulled, ev.PullEnded)
            assert pulled.outcome is ev.PullOutcome.UNREACHABLE
        else:
            assert isinstance(pulled, ev.Delivered)
