"""Invariants of every routing policy, for arbitrary traffic."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.routing.admission_queue import Assignment
from solver.routing.options import VARIANTS, RoutingOptions
from solver.routing.router import Router
from tests.routed import INSTANCES, TOKEN_S, routed, router

arrivals = st.lists(
    st.tuples(st.floats(0.001, 0.3), st.integers(1, 8000), st.sampled_from("abc")),
    min_size=1,
    max_size=40,
)
Arrivals = list[tuple[float, int, str]]


@dataclass(slots=True)
class Served:
    """A request in a model of instances that prefill requests one after another."""

    assignment: Assignment
    began_at: float
    ended_at: float


def serve(policy: Router, traffic: Arrivals) -> list[Served]:
    """Serve *traffic*; assert that no instance is idle while a request waits for it."""
    free_at, waiting, served = dict.fromkeys(INSTANCES, 0.0), list[Served](), list[Served]()
    at = 0.0
    events: list[tuple[float, int]] = []
    for number, (gap_s, _, _) in enumerate(traffic):
        at += gap_s
        events.append((at, number))
    while events or waiting:
        ends = min((each.ended_at for each in waiting), default=float("inf"))
        if events and events[0][0] <= ends:
            now, number = events.pop(0)
            _, tokens, tenant = traffic[number]
            policy.submit(routed(number, at=now, tokens=tokens, tenant=tenant), now)
        else:
            done = min(waiting, key=lambda each: each.ended_at)
            waiting.remove(done)
            now = done.ended_at
            policy.first_token(done.assignment.request.request_id, now)
            policy.finish(done.assignment.request.request_id, now)
        for assignment in policy.dispatch(now):
            began_at = max(now, free_at[assignment.instance_id])
            ended_at = began_at + assignment.request.prompt_tokens * TOKEN_S
            free_at[assignment.instance_id] = ended_at
            waiting.append(Served(assignment, began_at, ended_at))
            served.append(waiting[-1])
        for instance_id, free in free_at.items():
            assert free > now or not policy.num_waiting(instance_id)
    return served


@pytest.mark.parametrize("name", VARIANTS)
@given(traffic=arrivals)
@settings(max_examples=20)
def test_all_requests_are_served_once_and_no_instance_idles(name: str, traffic: Arrivals):
    served = serve(router(VARIANTS[name]), traffic)

    assert sorted(int(each.assignment.request.request_id) for each in served) == list(
        range(len(traffic))
    )


@pytest.mark.parametrize("name", VARIANTS)
@given(traffic=arrivals)
@settings(max_examples=10)
def test_equal_inputs_give_equal_decisions(name: str, traffic: Arrivals):
    first, second = (
        [
            (each.assignment.request.request_id, each.assignment.instance_id, each.ended_at)
            for each in serve(router(VARIANTS[name]), traffic)
        ]
        for _ in range(2)
    )

    assert first == second


def overtakers(policy: RoutingOptions, *, seconds: float) -> list[float]:
    """Number of short requests that one instance serves before a long request of time 0."""
    alone = router(replace(policy, max_engine_wait_s=0.0), INSTANCES[:1])
    alone.submit(routed(0, tokens=4000), 0.0)
    alone.dispatch(0.0)
    alone.submit(routed(1, tokens=9000, ttft_s=4.0), 0.0)
    before, at, number, running = list[float](), 0.0, 2, "0"
    while at < seconds:
        at += 0.1
        alone.submit(routed(number, at=at, tokens=1000), at)
        number += 1
        alone.first_token(running, at)  # type: ignore[arg-type]  # ids of tests
        alone.finish(running, at)  # type: ignore[arg-type]  # ids of tests
        for assignment in alone.dispatch(at):
            running = assignment.request.request_id
            if running == "1":
                return before
            before.append(assignment.request.arrived_at)
    return before


def test_a_long_request_is_served_once_its_age_outweighs_its_size():
    """
    A request of size 1.2 s and a quantile 1.5 times as large is served within 8 s, with aging of
    0.2 s per second.
    """
    before = overtakers(replace(VARIANTS["default"], late_penalty_s=0.0), seconds=60)

    assert before
    assert max(before) <= 8.0


def test_the_late_penalty_divided_by_the_aging_bounds_additional_waiting():
    """A penalty of 3 s, with aging of 0.2 s per second, delays by at most 15 s."""
    before = overtakers(VARIANTS["default"], seconds=60)

    assert 8.0 < max(before) <= 8.0 + 15.0


@given(traffic=arrivals, penalty_s=st.floats(0.1, 10.0), ttft_s=st.floats(0.05, 2.0))
@settings(max_examples=40)
def test_a_late_request_lets_a_bounded_number_of_others_go_first(
    traffic: Arrivals, penalty_s: float, ttft_s: float
):
    """A request whose key is larger by more than the penalty never overtakes."""
    options = replace(VARIANTS["default"], late_penalty_s=penalty_s, max_engine_wait_s=0.0)
    policy = router(options, INSTANCES[:1])
    assigned = [
        policy.submit(routed(number, tokens=tokens, tenant=tenant, ttft_s=ttft_s), 0.0)
        for number, (_, tokens, tenant) in enumerate(traffic)
    ]
    plain = {each.request.request_id: each.key for each in assigned}
    order, now = list[Assignment](), 0.0
    while sent := policy.dispatch(now):
        (only,) = sent
        order.append(only)
        now += only.estimate.mean_s
        policy.first_token(only.request.request_id, now)
        policy.finish(only.request.request_id, now)

    keys = [plain[each.request.request_id] for each in order]
    assert sorted(keys) == sorted(plain.values())
    assert all(max(keys[: i + 1]) <= keys[i] + penalty_s + 1e-9 for i in range(len(keys)))
    assert all(
        each.key == pytest.approx(plain[each.request.request_id] + penalty_s * each.is_late)
        for each in order
    )


def test_with_the_papers_aging_a_long_request_waits_almost_a_minute():
    """
    With aging of 0.02 s per second (QUARTZ's lambda), a request of size 1.2 s waits for 50 to 61 s.
    """
    before = overtakers(VARIANTS["no-fairness"], seconds=120)

    assert 50 < max(before) <= 61


@given(traffic=arrivals)
@settings(max_examples=20)
def test_fcfs_keeps_the_order_on_each_instance(traffic: Arrivals):
    served = serve(router(VARIANTS["fifo-ll"]), traffic)
    for instance_id in INSTANCES:
        numbers = [
            int(each.assignment.request.request_id)
            for each in served
            if each.assignment.instance_id == instance_id
        ]
        assert all(one < other for one, other in pairwise(numbers))
