"""Choice of the queue for the next pull."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from solver.scheduling.keys import FAR_S
from solver.scheduling.pulling import Openings, PullOrder, Source, SourceKind, deference_s
from tests.clocks import NOW

POLL_S = 1.0


def source(queue: str, time_left_s: float = 1.0, kind: SourceKind = SourceKind.LANE) -> Source:
    return Source(queue=queue, kind=kind, time_left_s=time_left_s)


def order_of(*sources: Source, best_effort_every: int = 8) -> PullOrder:
    order = PullOrder(poll_s=POLL_S, best_effort_every=best_effort_every)
    order.set_sources(sources, NOW)
    return order


def next_of(order: PullOrder, now: float = NOW, *, room: bool = True) -> str | None:
    chosen = order.next(now, Openings(yielding=room))
    return None if chosen is None else chosen.queue


def wake_of(order: PullOrder, now: float = NOW, *, room: bool = True) -> float:
    return order.wake_at(now, Openings(yielding=room))


DUMP = source("dump", math.inf)


def test_without_sources_there_is_nothing_to_pull():
    order = PullOrder(poll_s=POLL_S)
    assert next_of(order) is None
    assert wake_of(order) == math.inf


def test_the_most_urgent_band_goes_first():
    assert next_of(order_of(source("later", 10), source("sooner", 1))) == "sooner"


def test_at_equal_deadlines_evicted_requests_go_first():
    order = order_of(source("lane"), source("resume", kind=SourceKind.RESUME))
    assert next_of(order) == "resume"


def test_overflow_waits_until_its_own_lane_is_empty():
    overflow = Source(queue="overflow", kind=SourceKind.OVERFLOW, time_left_s=1.0, behind="lane")
    order = order_of(source("lane", 1), source("other lane", 100), overflow)
    assert next_of(order) == "lane"
    order.empty("lane", NOW)
    assert next_of(order) == "overflow"
    order.nonempty("lane", NOW)
    assert next_of(order) == "lane"


def test_the_wake_time_ignores_sources_that_may_not_be_pulled():
    """The wake time is the time at which the next source may be pulled."""
    overflow = Source(queue="overflow", kind=SourceKind.OVERFLOW, time_left_s=1.0, behind="lane")
    order = order_of(source("lane"), overflow, DUMP)
    order.hold("lane", NOW + 2)

    assert next_of(order, room=False) is None
    assert wake_of(order, room=False) == NOW + 2
    assert (next_of(order), wake_of(order)) == ("dump", 0.0)


def test_a_busy_instance_leaves_new_requests_to_others():
    order = order_of(source("lane"), source("inbox", 1.0, SourceKind.INBOX))
    for queue in ("lane", "inbox"):
        order.empty(queue, NOW)
    assert order.nonempty("lane", NOW, after_s=0.05)
    assert (next_of(order), wake_of(order)) == (None, NOW + 0.05)
    assert next_of(order, NOW + 0.05) == "lane"

    order.nonempty("inbox", NOW, after_s=0.05)
    assert next_of(order) == "inbox"


def test_notice_that_precedes_the_answer_of_a_poll_is_not_lost():
    """The request may have been published after the broker had found the queue empty."""
    order = order_of(source("lane"))
    order.nonempty("lane", NOW + 0.01)
    order.empty("lane", NOW + 0.02, asked_at=NOW)
    assert next_of(order, NOW + 0.02) == "lane"

    order.empty("lane", NOW + 0.03, asked_at=NOW + 0.02)
    assert next_of(order, NOW + 0.03) is None
    assert wake_of(order, NOW + 0.03) == NOW + 0.03 + POLL_S


def test_a_queue_that_was_not_empty_is_polled_at_once():
    order = order_of(source("lane"))
    order.nonempty("lane", NOW, after_s=0.1)
    assert next_of(order) == "lane"


@given(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_more_work_never_defers_less_and_never_for_long(
    held: tuple[float, float], taken: tuple[float, float]
):
    (less_s, more_s), (less, more) = sorted(held), sorted(taken)
    assert 0 <= deference_s(less_s, less) <= deference_s(more_s, more) <= 0.1


def test_of_instances_without_waiting_work_the_one_with_the_smaller_batch_polls_first():
    assert deference_s(0.0, taken=0.0) == 0.0
    assert deference_s(0.0, taken=0.25) < deference_s(0.0, taken=0.5)


def test_relegated_work_counts_as_best_effort():
    order = order_of(source("relegated", 0.0, SourceKind.RELEGATED), source("lane", 100))
    assert next_of(order) == "lane"
    assert next_of(order_of(source("relegated", 0.0, SourceKind.RELEGATED)), room=False) is None


def test_relegated_work_and_best_effort_take_turns():
    relegated = source("relegated", 0.0, SourceKind.RELEGATED)
    order = order_of(relegated, source("batch", math.inf), source("lane", 100))

    pulls = [next_of(order) for _ in range(32)]

    assert [queue for queue in pulls if queue != "lane"] == ["relegated", "batch"] * 2


def test_relegated_work_precedes_work_whose_deadline_is_far():
    relegated = source("relegated", 0.0, SourceKind.RELEGATED)
    order = order_of(relegated, source("far", 2 * FAR_S))

    assert [next_of(order) for _ in range(3)] == ["relegated"] * 3
    order.empty("relegated", NOW)
    assert next_of(order) == "far"


def test_inbox_is_read_whatever_its_last_request_was():
    order = order_of(source("inbox", 1.0, SourceKind.INBOX))
    order.pulled("inbox", NOW + 2 * FAR_S)

    assert next_of(order, room=False) == "inbox"


def test_queue_whose_first_request_may_be_old_no_longer_yields():
    """The queue was not empty since then, as far as is known."""
    order = order_of(source("batch", math.inf))
    openings = Openings(yielding=False, aging_bound_s=600.0)
    assert order.next(NOW + 599.0, openings) is None
    chosen = order.next(NOW + 601.0, openings)
    assert chosen is not None

    order.pulled("batch", math.inf, arrived_at=NOW + 590.0)
    assert order.next(NOW + 601.0, openings) is None
    order.empty("batch", NOW + 1200.0)
    assert order.next(NOW + 1700.0, openings) is None


def test_work_that_needs_long_is_urgent_earlier():
    order = order_of(source("long", 100.0))
    order.pulled("long", NOW + 100.0, work_tokens=1000.0)
    for per_token_s, chosen in ((0.05, None), (0.15, "long")):
        openings = Openings(yielding=False, patience_s=10.0, patience_s_per_token=per_token_s)
        found = order.next(NOW, openings)
        assert (found and found.queue) == chosen


def test_the_turn_of_an_empty_queue_goes_to_the_other():
    relegated = source("relegated", 0.0, SourceKind.RELEGATED)
    order = order_of(relegated, source("batch", math.inf))
    order.empty("relegated", NOW)

    assert [next_of(order) for _ in range(3)] == ["batch"] * 3


def test_the_last_deadline_seen_is_used_for_the_next():
    order = order_of(source("one", 10), source("other", 12))
    order.pulled("one", NOW + 13)
    assert next_of(order) == "other"


def test_an_empty_source_is_not_polled_for_the_poll_period():
    order = order_of(source("lane"))
    order.empty("lane", NOW)
    assert next_of(order, NOW + POLL_S - 0.01) is None
    assert wake_of(order) == NOW + POLL_S
    assert next_of(order, NOW + POLL_S) == "lane"


def test_a_notice_ends_the_wait():
    order = order_of(source("lane"))
    order.empty("lane", NOW)
    assert order.nonempty("lane", NOW + 0.1)
    assert next_of(order, NOW + 0.1) == "lane"


def test_a_missing_queue_is_polled_rarely_or_on_notice():
    order = order_of(source("resume"))
    order.absent("resume", NOW, asked_at=NOW)
    assert next_of(order, NOW + 5 * POLL_S) is None
    assert wake_of(order) == NOW + 600.0
    assert next_of(order, NOW + 600.0) == "resume"
    order.absent("resume", NOW + 600.0, asked_at=NOW + 600.0)
    order.nonempty("resume", NOW + 600.1)
    assert next_of(order, NOW + 600.1) == "resume"


def test_a_notice_during_a_poll_overrides_the_polls_answer():
    order = order_of(source("resume"))
    order.nonempty("resume", NOW + 0.1)
    order.absent("resume", NOW + 0.2, asked_at=NOW)
    assert next_of(order, NOW + 0.2) == "resume"


def test_every_queue_is_polled_again_after_missed_notices():
    order = order_of(source("lane"), source("resume"))
    order.empty("lane", NOW)
    order.absent("resume", NOW, asked_at=NOW)
    order.look_again(NOW)
    assert wake_of(order) <= NOW
    order.empty("lane", NOW + 50.0)
    order.absent("resume", NOW + 50.0, asked_at=NOW + 50.0)
    assert next_of(order, NOW + 60.0) in {"lane", "resume"}
    order.absent("resume", NOW + 60.0, asked_at=NOW + 60.0)
    order.empty("lane", NOW + 600.0)
    assert wake_of(order) == NOW + 600.0 + POLL_S


def test_a_notice_of_a_foreign_queue_is_ignored():
    assert not order_of(source("lane")).nonempty("other", NOW)


def test_best_effort_is_pulled_if_no_urgent_work_waits():
    order = order_of(source("lane"), DUMP)
    order.empty("lane", NOW)
    assert next_of(order) == "dump"


def test_best_effort_needs_room():
    order = order_of(DUMP)
    assert next_of(order, room=False) is None


def test_unimportant_work_is_delayed_in_an_overload():
    low = Source(queue="low", kind=SourceKind.LANE, time_left_s=1.0, is_important=False)
    order = order_of(low, source("high", 10.0))
    assert next_of(order) == "low"
    chosen = order.next(NOW, Openings(yielding=True), unimportant_delay_s=20.0)
    assert chosen is not None
    assert chosen.queue == "high"


def test_work_with_a_far_deadline_needs_the_room_of_best_effort():
    order = order_of(source("night", 2 * FAR_S), DUMP)
    assert (next_of(order, room=False), wake_of(order, room=False)) == (None, math.inf)
    assert next_of(order) == "night"

    order.pulled("night", NOW + FAR_S + 100.0)
    assert next_of(order, NOW + 99.0, room=False) is None
    assert next_of(order, NOW + 100.0, room=False) == "night"


def test_a_share_of_pulls_is_best_effort_even_under_load():
    order = order_of(source("lane"), DUMP, best_effort_every=4)
    assert [next_of(order) for _ in range(8)] == [*["lane"] * 3, "dump"] * 2


def test_without_best_effort_no_pull_is_reserved():
    order = order_of(source("lane"), best_effort_every=2)
    assert {next_of(order) for _ in range(10)} == {"lane"}


def test_the_inbox_is_found_regardless_of_other_waiting_work():
    """An instance that may not pull must return the requests in its inbox."""
    order = order_of(source("lane", 0.0), source("inbox", 9.0, SourceKind.INBOX))
    found = order.inbox(NOW)
    assert found is not None
    assert (found.queue, order.inbox_at()) == ("inbox", 0.0)

    order.empty("inbox", NOW)
    assert (order.inbox(NOW), order.inbox_at()) == (None, NOW + POLL_S)
    assert (order_of(source("lane")).inbox(NOW), order_of().inbox_at()) == (None, math.inf)


def test_a_held_queue_is_not_polled():
    order = order_of(source("resume", kind=SourceKind.RESUME))
    order.hold("resume", NOW + 2)
    assert next_of(order, NOW + 1.99) is None
    assert wake_of(order) == NOW + 2
    assert next_of(order, NOW + 2) == "resume"


def test_a_notice_does_not_end_a_hold():
    """An eviction publishes a notice of the requeued request, which must not be pulled at once."""
    order = order_of(source("resume", kind=SourceKind.RESUME))
    order.hold("resume", NOW + 2)
    order.nonempty("resume", NOW)
    assert next_of(order, NOW + 1) is None


def test_a_hold_continues_after_a_change_of_sources():
    order = order_of(source("lane"))
    order.hold("resume", NOW + 2)
    order.set_sources([source("resume")], NOW + 1)
    assert next_of(order, NOW + 1) is None
    assert next_of(order, NOW + 2) == "resume"


def test_remaining_sources_keep_what_was_learned():
    order = order_of(source("lane"))
    order.empty("lane", NOW)
    order.set_sources([source("lane"), source("new", 50)], NOW)
    assert next_of(order) == "new"
    assert order.queues == ("lane", "new")


events = st.lists(
    st.tuples(
        st.sampled_from(["empty", "nonempty", "hold", "pulled", "next"]),
        st.integers(0, 4),
        st.floats(0, 0.7),
    ),
    max_size=60,
)


@given(events=events)
@example(events=[("empty", 0, 0.0), ("empty", 0, 0.5), ("empty", 1, 0.5)])
def test_an_empty_or_held_source_is_never_returned(events: list[tuple[str, int, float]]):
    queues = [source(f"s{n}", math.inf if n == 4 else n, SourceKind(n % 4)) for n in range(5)]
    order = order_of(*queues)
    empty_until = dict.fromkeys((each.queue for each in queues), 0.0)
    held_until = dict(empty_until)
    now = NOW
    for action, number, step_s in events:
        now += step_s
        queue = f"s{number}"
        if action == "empty":
            order.empty(queue, now)
            if empty_until[queue] <= now:  # a concurrent poll changes nothing
                empty_until[queue] = now + POLL_S
        elif action == "nonempty":
            order.nonempty(queue, now)
            empty_until[queue] = min(empty_until[queue], now)
        elif action == "hold":
            order.hold(queue, now + 2)
            held_until[queue] = now + 2
        elif action == "pulled":
            order.pulled(queue, now + number)
        awake = [q for q in empty_until if max(empty_until[q], held_until[q]) <= now]
        chosen = next_of(order, now)
        assert (chosen in awake) if awake else (chosen is None)


def test_polls_that_find_nothing_become_rarer_until_a_notice():
    order = PullOrder(poll_s=1.0, most_poll_s=5.0)
    order.set_sources([Source(queue="q", kind=SourceKind.LANE, time_left_s=1.0)], 0.0)
    now, waits = 0.0, []
    for _ in range(5):
        order.empty("q", now)
        order.empty("q", now)  # a concurrent poll changes nothing
        at = order.wake_at(now, Openings(yielding=True))
        waits.append(at - now)
        now = at
    order.nonempty("q", now)
    order.empty("q", now)

    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert order.wake_at(now, Openings(yielding=True)) == now + 1.0
