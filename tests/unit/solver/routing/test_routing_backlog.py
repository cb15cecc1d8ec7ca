"""Expected waits, and the state that routers share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import InstanceId, RequestId
from shared.contracts.routing import InstanceLoad, SoftState, WorkTotals
from solver.routing.backlog import LOST_AFTER_S, OVERDUE_S, Backlog, merged

W, X = InstanceId("w"), InstanceId("x")


def assigned(backlog: Backlog, number: int, mean_s: float, at: float = 0.0) -> RequestId:
    request_id = RequestId(str(number))
    backlog.assign(request_id, W, mean_s=mean_s, tokens=round(mean_s * 1000), now=at)
    return request_id


def test_waits_add_up_means_and_end_with_first_tokens():
    backlog = Backlog("r")
    first, second = assigned(backlog, 1, 0.5), assigned(backlog, 2, 0.25)
    assert backlog.expected_wait_s(W, 0.0) == pytest.approx(0.75)

    backlog.dispatch(first, 0.0)
    backlog.finish(first, 0.5)
    backlog.finish(first, 0.5)
    assert backlog.expected_wait_s(W, 0.5) == pytest.approx(0.25)
    backlog.finish(second, 0.75)
    assert backlog.expected_wait_s(W, 0.75) == 0
    assert backlog.expected_wait_s(X, 0.75) == 0


def test_work_decays_by_at_most_a_typical_request():
    backlog = Backlog("r")
    for number in (1, 2):
        backlog.dispatch(assigned(backlog, number, 1.0), 0.0)

    assert backlog.engine_wait_s(W, 0.5) == pytest.approx(1.5)
    assert backlog.engine_wait_s(W, 50.0) == pytest.approx(1.0)


def test_a_slow_instance_has_longer_waits():
    """The instance took 2 s for an expected 1 s of work."""
    backlog = Backlog("r")
    for number in range(10):
        request_id = assigned(backlog, number, 1.0, at=2.0 * number)
        backlog.dispatch(request_id, 2.0 * number)
        backlog.finish(request_id, 2.0 * number + 2.0)
    assigned(backlog, 99, 1.0, at=20.0)

    assert backlog.expected_wait_s(W, 20.0) == pytest.approx(2.0, rel=0.1)


def test_reports_correct_the_assumed_engine_work():
    backlog = Backlog("r")
    backlog.dispatch(assigned(backlog, 1, 1.0), 0.0)
    backlog.observe(W, InstanceLoad(seq=2, at=0.0, prefill_backlog_tokens=600), 0.0)
    backlog.observe(W, InstanceLoad(seq=1, at=0.0, prefill_backlog_tokens=9000), 0.0)

    assert backlog.engine_wait_s(W, 0.0) == pytest.approx(0.8)
    assert backlog.load(W).seq == 2


def test_lost_first_tokens_stop_counting():
    backlog = Backlog("r")
    backlog.dispatch(assigned(backlog, 1, 1.0), 0.0)
    late = 2 * LOST_AFTER_S
    backlog.observe(W, InstanceLoad(seq=1, at=late, running=3), late)

    assert backlog.expected_wait_s(W, late) == 0


def test_dropped_requests_do_not_change_the_pace():
    """Requests are repeatedly sent to another instance after 1 % of the expected time."""
    one, other = Backlog("one"), Backlog("other")
    for number in range(50):
        request_id = assigned(one, number, 1.0, at=number)
        if number % 2:
            one.dispatch(request_id, number)
        one.give_up(request_id, number + 0.01)
        one.give_up(request_id, number + 0.01)
        other.adopt(one.snapshot(), number + 0.01)
    for backlog in (one, other):
        assert backlog.num_outstanding(W) == 0
        assert backlog.expected_wait_s(W, 50.0) == 0
        assigned(backlog, 99, 1.0, at=50.0)

        assert backlog.expected_wait_s(W, 50.0) == pytest.approx(1.0)


def test_service_seen_by_another_router_gives_the_pace():
    one, other = Backlog("one"), Backlog("other")
    for number in range(20):
        request_id = assigned(one, number, 1.0, at=2.0 * number)
        other.adopt(one.snapshot(), 2.0 * number)
        one.dispatch(request_id, 2.0 * number)
        one.finish(request_id, 2.0 * number + 2.0)
        other.adopt(one.snapshot(), 2.0 * number + 2.0)
    assigned(other, 99, 1.0, at=40.0)

    assert other.expected_wait_s(W, 40.0) == pytest.approx(2.0, rel=0.2)


NOW = 1_750_000_000.0


def served(backlog: Backlog, number: int, at: float) -> None:
    """Serve a request with 1 s of expected work in 1 s."""
    request_id = assigned(backlog, number, 1.0, at=at)
    backlog.dispatch(request_id, at)
    backlog.finish(request_id, at + 1.0)


def paces(one: Backlog, other: Backlog, *, begin: float, count: int = 20) -> list[float]:
    """Paces of the instance that *other* adopts while *one* sends work."""
    found = []
    for number in range(count):
        served(one, number, begin + number)
        other.adopt(one.snapshot(), begin + number + 1.0)
        found.append(other._instances[W].pace.value)
    return found


def test_a_newly_known_router_has_no_earlier_service():
    one, other = Backlog("one"), Backlog("other")
    for number in range(1000):
        served(one, number, NOW + number)

    assert all(0.7 < pace < 1.4 for pace in paces(one, other, begin=NOW + 1000.0))


def test_earlier_service_of_a_returning_router_does_not_count_as_recent():
    one, other = Backlog("one"), Backlog("other")
    paces(one, other, begin=NOW)
    other.forget("one")
    for number in range(100):
        served(one, number, NOW + 30.0 + number)

    assert all(0.7 < pace < 1.4 for pace in paces(one, other, begin=NOW + 130.0))


def test_an_instance_without_work_is_idle_not_slow():
    one, other = Backlog("one"), Backlog("other")
    for number in range(30):
        request_id = assigned(one, number, 0.2, at=NOW + 10.0 * number)
        one.dispatch(request_id, NOW + 10.0 * number)
        other.adopt(one.snapshot(), NOW + 10.0 * number)
        one.finish(request_id, NOW + 10.0 * number + 0.2)
        other.adopt(one.snapshot(), NOW + 10.0 * number + 0.2)

    assert 0.7 < other._instances[W].pace.value < 1.4


@pytest.mark.parametrize("waiting", [0, 99])
def test_work_that_only_waits_does_not_stop_the_engine(waiting: int):
    backlog = Backlog("r")
    backlog.dispatch(assigned(backlog, 0, 1.0), 0.0)
    for number in range(1, waiting + 1):
        assigned(backlog, number, 1.0)

    assert backlog.engine_wait_s(W, 0.9) == pytest.approx(0.1)


def test_the_cost_of_tokens_follows_a_change_of_engine():
    backlog = Backlog("r")
    for number in range(20_000):
        assigned(backlog, number, 1.0)
        backlog.give_up(RequestId(str(number)), 0.0)
    for number in range(2000):
        backlog.assign(RequestId(str(number)), W, mean_s=3.0, tokens=1000, now=0.0)
        backlog.give_up(RequestId(str(number)), 0.0)
    for number in range(4):
        backlog.assign(RequestId(str(number)), W, mean_s=3.0, tokens=1000, now=0.0)

    assert backlog.outstanding_tokens(W) == pytest.approx(4000, rel=0.05)


def test_tokens_of_unknown_cost_have_no_effect():
    """Only another router has sent requests to the instance."""
    one, other = Backlog("one"), Backlog("other")
    one.dispatch(assigned(one, 1, 1.2), 0.0)
    other.adopt(one.snapshot(), 0.0)
    other.observe(W, InstanceLoad(seq=1, at=0.0, prefill_backlog_tokens=40_000), 0.0)

    assert other.engine_wait_s(W, 0.0) == pytest.approx(1.2)


def test_routers_count_each_others_work():
    one, other = Backlog("one"), Backlog("other")
    assigned(one, 1, 0.5)
    assigned(other, 1, 0.25)
    for _ in range(2):
        one.adopt(other.snapshot(), 0.0)
        other.adopt(one.snapshot(), 0.0)

    assert one.expected_wait_s(W, 0.0) == pytest.approx(0.75)
    assert other.expected_wait_s(W, 0.0) == pytest.approx(0.75)


def test_own_work_in_the_state_of_other_routers_is_ignored():
    one, other = Backlog("one"), Backlog("other")
    request_id = assigned(one, 1, 0.5)
    other.adopt(one.snapshot(), 0.0)
    one.finish(request_id, 0.0)
    one.adopt(other.snapshot(), 0.0)

    assert one.expected_wait_s(W, 0.0) == 0


def test_work_of_all_routers_is_converted_to_tokens():
    """At 1000 tokens per second, another router's 0.5 s count as 500 tokens."""
    one, other = Backlog("one"), Backlog("other")
    first = assigned(one, 1, 0.25)
    assigned(other, 1, 0.5)
    assert one.outstanding_tokens(W) == 250

    one.adopt(other.snapshot(), 0.0)
    assert one.outstanding_tokens(W) == 750
    one.dispatch(first, 0.0)
    assert one.outstanding_tokens(W) == 750
    one.finish(first, 0.0)
    assert one.outstanding_tokens(W) == 500
    assert one.outstanding_tokens(X) == 0


@given(
    sizes=st.lists(st.tuples(st.floats(0.001, 10), st.sampled_from([0, 1, 2])), max_size=20),
    reported=st.integers(0, 100_000),
)
def test_outstanding_tokens_are_at_least_the_reported_tokens(
    sizes: list[tuple[float, int]], reported: int
):
    """Sizes are proportional to tokens; a request in stage 2 has its first token."""
    backlog, outstanding = Backlog("r"), 0
    for number, (size_s, stage) in enumerate(sizes):
        request_id = assigned(backlog, number, size_s)
        outstanding += round(size_s * 1000) if stage < 2 else 0
        if stage:
            backlog.dispatch(request_id, 0.0)
        if stage == 2:
            backlog.finish(request_id, 0.0)
    backlog.observe(W, InstanceLoad(seq=1, prefill_backlog_tokens=reported), 0.0)

    tokens = backlog.outstanding_tokens(W)
    assert tokens >= reported
    # The test rounds each size to whole tokens, so the average may be off by one token per request.
    assert tokens == pytest.approx(max(outstanding, reported), rel=0.5, abs=len(sizes) + 1)


def work_of(version: int) -> WorkTotals:
    return WorkTotals(version=version, assigned_s=version, num_assigned=version)


states = st.builds(
    SoftState,
    work=st.dictionaries(
        st.sampled_from(["one", "other"]),
        st.dictionaries(st.sampled_from([W, X]), st.integers(0, 9).map(work_of)),
    ),
    loads=st.dictionaries(
        st.sampled_from([W, X]), st.integers(0, 9).map(lambda seq: InstanceLoad(seq=seq, at=seq))
    ),
)


@given(one=states, other=states, third=states)
def test_merging_is_commutative_associative_and_idempotent(
    one: SoftState, other: SoftState, third: SoftState
):
    assert merged(one, other) == merged(other, one)
    assert merged(merged(one, other), third) == merged(one, merged(other, third))
    assert merged(merged(one, other), other) == merged(one, other)


@given(
    sizes=st.lists(st.floats(0, 10), max_size=20),
    times=st.lists(st.floats(0, 100), min_size=20, max_size=20),
    reported=st.integers(0, 100_000),
)
def test_waits_are_never_negative(sizes: list[float], times: list[float], reported: int):
    backlog = Backlog("r")
    for number, (size_s, at) in enumerate(zip(sizes, times, strict=False)):
        request_id = assigned(backlog, number, size_s, at)
        if number % 2:
            backlog.dispatch(request_id, at)
        if number % 3 == 0:
            backlog.finish(request_id, at)
    backlog.observe(W, InstanceLoad(seq=1, at=50, prefill_backlog_tokens=reported), 50)
    for at in times:
        assert 0 <= backlog.engine_wait_s(W, at) <= backlog.expected_wait_s(W, at)


def test_requests_served_elsewhere_stop_counting():
    """The request was relegated to a lane while the engine always had work."""
    backlog = Backlog("r")
    backlog.dispatch(assigned(backlog, 1, 1.0), 0.0)
    late = 1.5 * OVERDUE_S
    backlog.observe(W, InstanceLoad(seq=1, at=late, prefill_backlog_tokens=500), late)

    assert backlog.num_outstanding(W) == 0
    assert backlog.is_idle(W)


def test_absurd_totals_of_other_routers_give_finite_counters():
    backlog = Backlog("r")
    assigned(backlog, 1, 0.01)
    work = WorkTotals(version=1, assigned_s=1.7e308, num_assigned=1)
    backlog.adopt(SoftState(work={"other": {W: work}}), 0.0)

    assert backlog.outstanding_tokens(W) > 0
