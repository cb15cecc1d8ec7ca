"""Acknowledgements that are sent together."""

from shared.broker.amqp.acks import GatheredAcks


class Begun:
    """Counts the calls of `begin`."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> None:
        self.number += 1


def test_acknowledgements_in_order_are_one() -> None:
    acks = GatheredAcks(3, Begun())

    assert [acks.add(tag) for tag in (1, 2, 3)] == [False, False, True]
    assert acks.taken() == [(3, True)]
    assert acks.taken() == []


def test_no_acknowledgement_includes_a_delivery_that_is_not_settled() -> None:
    acks = GatheredAcks(10, Begun())
    for tag in (1, 3, 4):
        acks.add(tag)

    assert acks.taken() == [(1, True), (3, False), (4, False)]

    acks.add(2)
    acks.add(5)

    assert acks.taken() == [(5, True)]


def test_a_delivery_that_was_settled_otherwise_leaves_no_gap() -> None:
    acks = GatheredAcks(10, Begun())
    acks.add(1)
    acks.settled(2)
    acks.add(3)

    assert acks.taken() == [(3, True)]


def test_waiting_begins_once_for_those_that_are_sent_together() -> None:
    begun = Begun()
    acks = GatheredAcks(10, begun)
    acks.add(1)
    acks.add(2)
    before = begun.number
    acks.taken()
    acks.add(3)

    assert (before, begun.number) == (1, 2)
