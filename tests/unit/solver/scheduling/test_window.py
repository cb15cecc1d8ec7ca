"""The order of requests in the window."""

from functools import partial

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import RequestId
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import QueuedRequest
from solver.scheduling.engine.entry import Rank
from solver.scheduling.keys import FAR_S, edf_key, rank_of
from solver.scheduling.window import Window, tokens_needed
from tests.clocks import NOW
from tests.queued import BATCH, BEST_EFFORT, CHAT, a_request

BOUND_S = 600.0

specs = st.lists(
    st.tuples(
        st.sampled_from([CHAT, BATCH, BEST_EFFORT, Slo(ttlt_s=3.0), Slo(ttlt_s=86400.0)]),
        st.booleans(),
        st.floats(0, 2000),
        st.integers(-2, 2),
    ),
    max_size=30,
)


def requests_of(specs: list[tuple[Slo, bool, float, int]]) -> list[QueuedRequest]:
    return [
        a_request(
            f"r{number}", slo=slo, relegated=relegated, arrived_at=NOW - age_s, priority=priority
        )
        for number, (slo, relegated, age_s, priority) in enumerate(specs)
    ]


def filled(requests: list[QueuedRequest]) -> Window:
    window = Window(aging_bound_s=BOUND_S)
    for request in requests:
        window.add(request, rank_of(request, NOW))
    return window


def drained(window: Window, now: float = NOW) -> list[str]:
    order = []
    while (head := window.peek(now)) is not None:
        order.append(head.request_id)
        window.remove(head.request_id)
    return order


def take(window: Window, request: QueuedRequest) -> None:
    assert window.remove(request.request_id) is request


@given(specs=specs)
def test_each_tier_is_served_in_order_of_its_key(specs: list[tuple[Slo, bool, float, int]]):
    requests = requests_of(specs)
    for rank in Rank:
        window = filled([request for request in requests if rank_of(request, NOW) is rank])
        expected = sorted(window, key=partial(edf_key, rank=rank, aging_bound_s=BOUND_S))
        assert drained(window) == [request.request_id for request in expected]


@given(specs=specs, removed=st.sets(st.integers(0, 29)))
def test_removing_a_request_keeps_the_order_of_other_requests(
    specs: list[tuple[Slo, bool, float, int]], removed: set[int]
):
    requests = requests_of(specs)
    window = filled(requests)
    kept = [request for number, request in enumerate(requests) if number not in removed]
    for number in removed:
        window.remove(RequestId(f"r{number}"))
    assert drained(window) == drained(filled(kept))


@given(specs=specs)
def test_counts_and_tokens_end_at_zero(
    specs: list[tuple[Slo, bool, float, int]],
):
    requests = requests_of(specs)
    window = filled(requests)
    assert [window.count(rank) for rank in Rank] == [
        sum(rank_of(request, NOW) is rank for request in requests) for rank in Rank
    ]
    assert window.tokens == sum(tokens_needed(request) for request in requests)
    drained(window)
    assert (len(window), window.tokens, [window.count(rank) for rank in Rank]) == (0, 0, [0, 0, 0])


@given(
    specs=specs.filter(bool),
    importances=st.lists(st.sampled_from(Importance), min_size=30, max_size=30),
    delay_s=st.sampled_from([0.0, 500.0]),
)
def test_request_would_be_first_if_it_is_first_once_it_is_added(
    specs: list[tuple[Slo, bool, float, int]], importances: list[Importance], delay_s: float
):
    requests = [
        msgspec.structs.replace(request, importance=importance)
        for request, importance in zip(requests_of(specs), importances, strict=False)
    ]
    *others, joining = requests
    window, rank = filled(others), rank_of(joining, NOW)
    expected = window.would_be_first(joining, rank, NOW, unimportant_delay_s=delay_s)
    assert len(window) == len(others)

    window.add(joining, rank)
    assert (window.peek(NOW, unimportant_delay_s=delay_s) is joining) == expected


def test_reachable_work_goes_before_relegated_work_before_best_effort():
    best_effort = a_request("dump", slo=BEST_EFFORT, arrived_at=NOW - 50)
    relegated = a_request("relegated", relegated=True)
    chat = a_request("chat", slo=BATCH)
    assert drained(filled([best_effort, relegated, chat])) == ["chat", "relegated", "dump"]


def test_aged_best_effort_goes_before_reachable_work_with_a_later_deadline():
    best_effort = a_request("dump", slo=BEST_EFFORT, arrived_at=NOW - BOUND_S)
    late, soon = a_request("late", slo=BATCH), a_request("soon", arrived_at=NOW - 5.001)
    window = filled([best_effort, late, soon])
    assert drained(window) == ["soon", "dump", "late"]


def test_heap_does_not_grow_with_requests_that_have_left():
    window = filled([a_request("first", slo=CHAT)])
    for number in range(2000):
        other = a_request(f"r{number}", slo=BATCH)
        window.add(other, Rank.REGULAR)
        take(window, other)

    assert sum(map(len, window._heaps.values())) < 200
    assert drained(window) == ["first"]


def test_best_effort_that_has_not_aged_does_not_overtake():
    best_effort = a_request("dump", slo=BEST_EFFORT, arrived_at=NOW - BOUND_S + 1)
    assert drained(filled([best_effort, a_request("chat", slo=Slo(ttlt_s=500))])) == [
        "chat",
        "dump",
    ]


def test_work_with_a_far_deadline_has_the_rank_of_best_effort():
    night = a_request("night", slo=Slo(ttlt_s=24 * 3600.0))
    assert rank_of(night, NOW) is Rank.BEST_EFFORT
    assert rank_of(night, night.deadline_at - FAR_S - 1) is Rank.BEST_EFFORT
    assert rank_of(night, night.deadline_at - FAR_S) is Rank.REGULAR


def test_far_work_in_the_window_competes_once_its_deadline_is_not_far():
    far = a_request("far", slo=Slo(ttlt_s=FAR_S + 100.0))
    window = filled([far, a_request("chat", slo=Slo(ttlt_s=500))])
    assert window.peek(NOW + 99.0) is not far
    later = a_request("later", slo=Slo(ttlt_s=2 * BOUND_S), arrived_at=NOW)
    window = filled([far, later])
    assert window.peek(NOW + 99.0) is later
    assert window.peek(NOW + 101.0) is far


def test_unimportant_work_is_delayed_in_an_overload():
    low = a_request("low", slo=Slo(ttlt_s=50), importance=Importance.LOW)
    high = a_request("high", slo=Slo(ttlt_s=100))
    later = a_request("later", slo=Slo(ttlt_s=300))
    window = filled([low, high, later])

    assert window.peek(NOW) is low
    assert window.peek(NOW, unimportant_delay_s=100.0) is high
    assert window.peek_rank(Rank.REGULAR, unimportant_delay_s=100.0) is high
    window.remove(high.request_id)
    assert window.peek(NOW, unimportant_delay_s=100.0) is low
    assert window.peek(NOW, unimportant_delay_s=500.0) is later


def test_priority_breaks_ties_only():
    requests = [
        a_request("low", priority=-1),
        a_request("high", priority=5),
        a_request("sooner", priority=-9, arrived_at=NOW - 1),
    ]
    assert drained(filled(requests)) == ["sooner", "high", "low"]


@given(
    gaps=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=200),
    slos=st.lists(st.sampled_from([CHAT, BATCH]), min_size=1, max_size=5),
)
def test_no_request_starves(gaps: list[float], slos: list[Slo]):
    """
    One request is served for each arrival, so the window never becomes empty.

    Best-effort and relegated work that is older than the bound waits only for requests with
    deadlines before the bound; later arrivals have no such deadline.
    """
    now = NOW
    best_effort = a_request("dump", slo=BEST_EFFORT)
    window = filled([best_effort, a_request("first", slo=BATCH)])
    aged_at = NOW + BOUND_S
    for number in range(2000):
        now += gaps[number % len(gaps)] + 0.5
        slo = slos[number % len(slos)]
        window.add(a_request(f"n{number}", slo=slo, arrived_at=now), Rank.REGULAR)
        head = window.peek(now)
        assert head is not None
        take(window, head)
        if head is best_effort:
            return
        assert now < aged_at or head.deadline_at <= aged_at
    raise AssertionError("best-effort work was never served")


def test_a_request_that_returns_relegated_has_only_its_new_rank():
    window = filled([a_request("r"), a_request("other", slo=BATCH)])
    window.remove(RequestId("r"))
    window.add(a_request("r", relegated=True), Rank.RELEGATED)
    assert window.peek_rank(Rank.REGULAR) is not None
    assert drained(window) == ["other", "r"]


def test_an_empty_window_has_no_head():
    window = Window(aging_bound_s=BOUND_S)
    assert window.peek(NOW) is None
    assert window.peek_rank(Rank.REGULAR) is None
    assert window.remove(RequestId("r")) is None
