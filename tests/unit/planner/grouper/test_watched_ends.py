"""A grouper knows which of its requests are past their ends, and only these."""

import math

from hypothesis import given
from hypothesis import strategies as st

from services.planner.grouper.watched_ends import GRACE_S, WatchedEnds
from shared.contracts.qos import OnLate
from tests.clocks import NOW
from tests.queued import BATCH, CHAT, a_request

LANE = "lane.2.tiny-llama.high.3.w0"


def keys(ends: WatchedEnds, now: float) -> list[str]:
    return [watched.key for watched in ends.due(now)]


def test_request_is_due_after_its_end_and_the_grace():
    ends = WatchedEnds(10)
    ends.add("k", a_request(expires_at=NOW + 1.0), LANE)

    assert keys(ends, NOW + 1.0 + GRACE_S - 0.01) == []
    assert keys(ends, NOW + 1.0 + GRACE_S) == ["k"]
    assert (len(ends), keys(ends, NOW + 100.0)) == (0, [])


def test_request_without_an_end_is_not_watched():
    ends = WatchedEnds(10)

    assert not ends.add("k", a_request(), LANE)
    assert len(ends) == 0


def test_number_of_watched_requests_is_bounded():
    ends = WatchedEnds(1)

    assert ends.add("a", a_request(expires_at=NOW), LANE)
    assert not ends.add("b", a_request(expires_at=NOW), LANE)


def test_first_token_moves_the_end():
    ends = WatchedEnds(10)
    ends.add("a", a_request(slo=CHAT, on_late=OnLate.DROP), LANE)
    ends.add("b", a_request(slo=CHAT, on_late=OnLate.DROP, expires_at=NOW + 50.0), LANE)
    ends.add("c", a_request(slo=BATCH, on_late=OnLate.DROP), LANE)
    for key in "abc":
        ends.begun(key)

    assert keys(ends, NOW + 49.0) == []
    assert keys(ends, NOW + 51.0) == ["b"]
    assert keys(ends, NOW + 101.0) == ["c"]


def test_request_whose_reply_could_not_be_sent_is_due_again():
    ends = WatchedEnds(10)
    ends.add("k", a_request(expires_at=NOW), LANE)
    (watched,) = ends.due(NOW + 1.0)
    ends.restore(watched)

    assert keys(ends, NOW + 1.0) == ["k"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("add", "remove", "begun", "due")), st.integers(0, 5), st.floats(0.0, 20.0)
    ),
    max_size=60,
)


@given(STEPS)
def test_due_are_exactly_the_present_requests_past_their_ends(
    steps: list[tuple[str, int, float]],
):
    ends, expected, now = WatchedEnds(100), dict[str, tuple[float, float]](), NOW
    for what, number, seconds in steps:
        key = f"k{number}"
        match what:
            case "add":
                drops = number % 2 == 0
                request = a_request(
                    slo=CHAT,
                    arrived_at=now,
                    expires_at=now + seconds,
                    on_late=OnLate.DROP if drops else OnLate.SERVE,
                )
                ends.add(key, request, LANE)
                hard = now + seconds
                expected[key] = (min(hard, now + 5.0) if drops else hard, hard)
            case "remove":
                ends.remove(key)
                expected.pop(key, None)
            case "begun":
                ends.begun(key)
                if key in expected:
                    expected[key] = (expected[key][1], expected[key][1])
            case _:
                now += seconds
                due = {name for name, (end, _) in expected.items() if end + GRACE_S <= now}
                assert set(keys(ends, now)) == due
                expected = {name: end for name, end in expected.items() if name not in due}
        assert len(ends) == len(expected)
    assert set(keys(ends, math.inf)) == set(expected)


def test_heap_does_not_grow_with_requests_that_have_ended():
    ends = WatchedEnds(10)
    for number in range(20_000):
        ends.add(f"k{number}", a_request(expires_at=NOW + 1000.0), LANE)
        ends.remove(f"k{number}")

    assert len(ends._heap) < 2000
