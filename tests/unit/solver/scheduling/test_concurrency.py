"""Limit of concurrent requests at a server that others run."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from solver.scheduling.concurrency import ConcurrencyLimit, FleetLimits

MOST = 64
counts = st.integers(0, 100)
looks = st.lists(st.tuples(counts, counts, counts, st.booleans()), max_size=80)


@example(looks=[(MOST + 1, 16, 49, True), (27, 0, 27, False)], first=33)
@given(looks=looks, first=st.integers(1, 100))
def test_limit_stays_between_one_and_its_maximum(
    looks: list[tuple[int, int, int, bool]], first: int
) -> None:
    limit = ConcurrencyLimit(most=MOST, first=first)
    for running, waiting, ours, has_waited in looks:
        limit.queue_seen(
            running=running,
            waiting=waiting,
            ours=ours,
            ours_waiting=ours // 2,
            ours_prefilling=ours // 3,
            has_waited=has_waited,
        )
        assert 1 <= limit.limit <= MOST
        assert limit.spare in (0, 1)


def look(
    limit: ConcurrencyLimit, *, running: int, waiting: int = 0, ours: int | None = None
) -> bool:
    """One look at a server whose requests are ours, and which computes no prompt."""
    return limit.queue_seen(
        running=running,
        waiting=waiting,
        ours=running + waiting if ours is None else ours,
        ours_waiting=waiting,
        ours_prefilling=waiting,
        has_waited=True,
    )


def test_request_that_waits_longer_than_an_iteration_shows_the_places() -> None:
    limit = ConcurrencyLimit(most=MOST, first=MOST)

    assert look(limit, running=10, waiting=6)
    assert (limit.limit, limit.is_sure) == (10, False)


@pytest.mark.parametrize(
    ("prefilling", "has_waited"), [(3, True), (2, False)], ids=["a prompt is computed", "just sent"]
)
def test_requests_that_wait_for_another_reason_show_nothing(
    prefilling: int,
    has_waited: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    limit = ConcurrencyLimit(most=MOST, first=MOST)
    is_found = limit.queue_seen(
        running=4,
        waiting=2,
        ours=6,
        ours_waiting=3,
        ours_prefilling=prefilling,
        has_waited=has_waited,
    )

    assert (is_found, limit.limit) == (False, MOST)


def test_queue_of_others_alone_does_not_limit_us() -> None:
    limit = ConcurrencyLimit(most=MOST, first=MOST)
    for _ in range(30):
        limit.queue_seen(
            running=30, waiting=9, ours=4, ours_waiting=0, ours_prefilling=0, has_waited=True
        )

    assert limit.limit == MOST


def test_requests_of_others_take_our_places() -> None:
    limit = ConcurrencyLimit(most=MOST, first=MOST)
    look(limit, running=30, waiting=5, ours=8)

    assert limit.limit == 3


def test_places_found_once_are_doubted() -> None:
    """A false number, here of a server with 64 places, is forgotten within some looks."""
    limit = ConcurrencyLimit(most=MOST, first=MOST)
    look(limit, running=4, waiting=1)
    for _ in range(30):
        look(limit, running=limit.limit)

    assert limit.limit == MOST


def test_server_with_ten_places_rarely_gets_more_than_it_can_run() -> None:
    limit = ConcurrencyLimit(most=MOST, first=MOST)
    queued = 0
    for _ in range(2000):
        ours = limit.limit + limit.spare
        queued += ours > 10
        look(limit, running=min(ours, 10), waiting=max(0, ours - 10))

    assert limit.limit == 10
    assert queued <= 20


def test_full_server_is_tried_with_spare_work_until_it_has_no_more_places() -> None:
    """A server was restarted with 14 places instead of 10."""
    limit = ConcurrencyLimit(most=MOST, first=MOST)
    for places in (10, 14):
        for _ in range(3000):
            ours = limit.limit + limit.spare
            look(limit, running=min(ours, places), waiting=max(0, ours - places))
        assert limit.limit == places


def test_limit_grows_only_while_it_is_used() -> None:
    limit = ConcurrencyLimit(most=MOST, first=10)
    look(limit, running=2)
    unused = limit.limit
    for _ in range(100):
        look(limit, running=limit.limit)

    assert (unused, limit.limit) == (10, MOST)


def test_what_is_found_of_one_server_is_assumed_for_others_of_its_kind() -> None:
    fleet = FleetLimits()
    limits = [ConcurrencyLimit(most=MOST, first=MOST) for _ in range(3)]
    for kind, limit in zip(("vllm", "vllm", "other"), limits, strict=True):
        fleet.join(kind, limit)
    look(limits[0], running=8, waiting=2)
    fleet.found(limits[0])

    assert [each.limit for each in limits] == [8, 8, MOST]
    assert not limits[1].is_sure


def test_equal_numbers_of_two_servers_confirm_each_other() -> None:
    fleet = FleetLimits()
    limits = [ConcurrencyLimit(most=MOST, first=MOST) for _ in range(2)]
    for limit in limits:
        fleet.join("vllm", limit)
    for limit in limits:
        look(limit, running=8, waiting=2)
        fleet.found(limit)

    assert all(each.is_sure for each in limits)


def test_server_that_has_left_confirms_nothing() -> None:
    fleet = FleetLimits()
    gone, here = (ConcurrencyLimit(most=MOST, first=MOST) for _ in range(2))
    for limit in (gone, here):
        fleet.join("vllm", limit)
    look(gone, running=8, waiting=2)
    fleet.leave(gone)
    look(here, running=8, waiting=2)
    fleet.found(here)

    assert not here.is_sure


def test_one_queue_is_one_finding_however_often_it_is_seen() -> None:
    """A server computes nothing while it loads its model for the first request."""
    limit = ConcurrencyLimit(most=MOST, first=4)
    for _ in range(50):
        look(limit, running=0, waiting=1)
    assert (limit.limit, limit.is_sure) == (1, False)

    for _ in range(20):
        look(limit, running=limit.limit)
    assert limit.limit >= 4


def test_number_that_was_only_assumed_confirms_nothing() -> None:
    fleet = FleetLimits()
    limits = [ConcurrencyLimit(most=MOST, first=MOST) for _ in range(2)]
    for limit in limits:
        fleet.join("vllm", limit)
    for _ in range(2):
        look(limits[0], running=1, waiting=1)
        fleet.found(limits[0])

    assert [each.limit for each in limits] == [1, 1]
    assert not any(each.is_sure for each in limits)
