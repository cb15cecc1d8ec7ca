"""Acknowledgements that are sent together."""

from shared.broker.amqp.acks import GatheredAcks


def taken(acks: GatheredAcks) -> list[tuple[int, bool]]:
    """Send all."""
    sent = []
    while (ack := acks.next()) is not None:
        sent.append((ack.tag, ack.multiple))
        acks.sent(ack)
    return sent


class Begun:
    """Counts the calls of `begin`."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> None:
        self.number += 1


def test_acknowledgements_in_order_are_one() -> None:
    acks = GatheredAcks(3, Begun())

    assert [acks.add(tag) for tag in (1, 2, 3)] == [False, False, True]
    assert taken(acks) == [(3, True)]
    assert taken(acks) == []


def test_no_acknowledgement_includes_a_delivery_that_is_not_settled() -> None:
    acks = GatheredAcks(10, Begun())
    for tag in (1, 3, 4):
        acks.add(tag)

    assert taken(acks) == [(1, True), (3, False), (4, False)]

    acks.add(2)
    acks.add(5)

    assert taken(acks) == [(5, True)]


def test_a_delivery_that_was_settled_otherwise_leaves_no_gap() -> None:
    acks = GatheredAcks(10, Begun())
    acks.add(1)
    acks.settled(2)
    acks.add(3)

    assert taken(acks) == [(3, True)]


def test_waiting_begins_once_for_those_that_are_sent_together() -> None:
    begun = Begun()
    acks = GatheredAcks(10, begun)
    acks.add(1)
    acks.add(2)
    before = begun.number
    taken(acks)
    acks.add(3)

    assert (before, begun.number) == (1, 2)


def test_acknowledgement_that_was_not_sent_is_sent_again() -> None:
    """The sender may be cancelled, and deliveries are settled while it waits for the socket."""
    acks = GatheredAcks(10, Begun())
    acks.add(1)
    acks.add(3)
    first = acks.next()
    acks.add(2)

    assert first is not None
    assert (first.tag, first.multiple) == (1, True)
    assert taken(acks) == [(3, True)]
