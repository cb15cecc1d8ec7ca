"""Routing decisions of one router."""

from dataclasses import replace

import pytest

from shared.contracts.base import RequestId, TenantId
from shared.contracts.routing import InstanceLoad
from solver.routing.options import VARIANTS, RoutingOptions
from solver.routing.router import Router
from tests.routed import INSTANCES, routed, router

W, X, Y, Z = INSTANCES
ALL = replace(VARIANTS["quartz"], num_candidates=None)


def order_of(policy: Router, *, now: float = 1.0) -> list[str]:
    """Order of one instance's dispatches when each first token arrives immediately."""
    order = []
    while sent := policy.dispatch(now):
        for assignment in sent:
            order.append(str(assignment.request.request_id))
            policy.finish(assignment.request.request_id, now)
    return order


def waiting(options: RoutingOptions) -> Router:
    """One busy instance for which one long and two short requests wait."""
    policy = router(options, (W,))
    policy.submit(routed(0, tokens=9000), 0.0)
    policy.dispatch(0.0)
    policy.submit(routed(1, tokens=8000, at=0.1), 0.1)
    policy.submit(routed(2, tokens=500, at=0.2), 0.2)
    policy.submit(routed(3, tokens=500, at=0.3), 0.3)
    return policy


def test_the_smallest_score_is_chosen():
    """Three instances have 1 s of work, the fourth has none."""
    policy = router(ALL)
    chosen = [policy.submit(routed(n, tokens=10_000), 0.0).instance_id for n in range(4)]

    assert set(chosen) == set(INSTANCES)


def test_a_prefix_match_outweighs_as_much_waiting_as_it_saves():
    """A match of 750 of 1,000 tokens saves 0.1125 s at the quantile, more than 0.05 s of wait."""
    policy = router(ALL)
    policy.submit(routed(0, tokens=500, cached={W: 1}), 0.0)
    assert policy.submit(routed(1, cached={W: 750}), 0.0).instance_id == W

    policy.submit(routed(2, tokens=3000, cached={W: 2999}), 0.0)
    for number in range(3, 7):
        policy.submit(routed(number, tokens=3000, cached={W: 2000}), 0.0)
    assert policy.submit(routed(8, cached={W: 100}), 0.0).instance_id != W


def test_an_engine_without_free_memory_is_avoided():
    policy = router(ALL)
    for seq, instance_id in enumerate((W, X, Y)):
        policy.observe(instance_id, InstanceLoad(seq=seq + 1, kv_utilization=0.99), 0.0)

    assert policy.submit(routed(0, cached={W: 900}), 0.0).instance_id == Z


def test_locality_prefers_the_prefix_then_the_least_loaded():
    policy = router(VARIANTS["locality-aware"])
    assert [policy.submit(routed(n, cached={Y: 5}), 0.0).instance_id for n in range(3)] == [Y] * 3
    assert policy.submit(routed(9), 0.0).instance_id == W


@pytest.mark.parametrize(
    ("name", "expected"), [("fifo-ll", ["1", "2", "3"]), ("quartz", ["2", "3", "1"])]
)
def test_waiting_requests_are_dispatched_by_key(name: str, expected: list[str]):
    policy = waiting(VARIANTS[name])
    assert policy.dispatch(0.3) == []
    policy.finish(routed(0).request_id, 1.0)

    assert order_of(policy) == expected


def test_recent_service_of_a_tenant_delays_it():
    policy = router(replace(VARIANTS["token-fair"]), (W,))
    policy.submit(routed(0, tokens=9000, tenant="a"), 0.0)
    policy.dispatch(0.0)
    policy.first_token(routed(0).request_id, 0.5)
    policy.served(TenantId("a"), 9000, 0.5)
    policy.submit(routed(1, tokens=9000, tenant="b", at=0.5), 0.5)
    policy.dispatch(0.5)
    policy.submit(routed(2, tenant="a", at=0.6), 0.6)
    policy.submit(routed(3, tenant="c", at=0.7), 0.7)
    policy.finish(routed(1).request_id, 1.0)

    assert order_of(policy) == ["3", "2"]


def test_late_requests_go_after_feasible_requests():
    """At 3 s, request 1 (due at 2 s) is late; request 2 is larger by 0.6 s and due at 10 s."""
    options = replace(VARIANTS["quartz"], late_penalty_s=1.0)
    late, at_once = (router(each, (W,)) for each in (options, VARIANTS["quartz"]))
    for policy in (late, at_once):
        policy.submit(routed(0, tokens=9000), 0.0)
        policy.dispatch(0.0)
        policy.submit(routed(1, tokens=1000), 0.0)
        policy.submit(routed(2, tokens=5000, ttft_s=10.0), 0.0)
        policy.finish(routed(0).request_id, 3.0)

    assert order_of(late, now=3.0) == ["2", "1"]
    assert order_of(at_once, now=3.0) == ["1", "2"]


def test_predictions_include_work_that_waits_and_work_of_other_routers():
    """The instance's report is 1 s old; work assigned after the report also counts."""
    policy = router(ALL, (W,))
    assert policy.submit(routed(0, tokens=3000), 0.0).candidate.prefill_backlog_tokens == 0
    assert policy.submit(routed(1, tokens=500), 0.0).candidate.prefill_backlog_tokens == 3000
    policy.observe(W, InstanceLoad(seq=1, prefill_backlog_tokens=9000), 0.0)
    assert policy.submit(routed(2, tokens=500), 0.0).candidate.prefill_backlog_tokens == 9000


def test_fallback_is_first_come_first_served_and_ends():
    policy = waiting(VARIANTS["quartz"])
    policy.fall_back()
    policy.fall_back()
    policy.finish(routed(0).request_id, 1.0)
    assert policy.is_fallen_back
    assert [str(each.request.request_id) for each in policy.dispatch(1.0)] == ["1"]

    policy.recover()
    policy.submit(routed(4, tokens=100, at=1.0), 1.0)
    policy.finish(routed(1).request_id, 1.5)
    assert not policy.is_fallen_back
    assert order_of(policy)[0] == "4"


def test_baselines_have_no_fallback():
    policy = waiting(VARIANTS["routing-only"])
    assert not policy.is_fallen_back
    never = waiting(VARIANTS["fifo-ll"])
    never.fall_back()
    assert not never.is_fallen_back


def test_a_discarded_request_is_not_dispatched():
    policy = router(VARIANTS["quartz"], (W,))
    policy.submit(routed(0, tokens=9000), 0.0)
    policy.dispatch(0.0)
    given_up = policy.submit(routed(1), 0.0).request.request_id
    policy.submit(routed(2), 0.0)
    policy.discard(given_up, 0.0)
    policy.discard(given_up, 0.0)
    policy.finish(routed(0).request_id, 1.0)

    assert order_of(policy) == ["2"]
    assert policy.backlog.expected_wait_s(W, 1.0) == 0


def test_unknown_requests_have_no_effect():
    policy = router(VARIANTS["quartz"])
    policy.first_token(routed(7).request_id, 0.0)
    policy.finish(routed(7).request_id, 0.0)
    policy.discard(routed(7).request_id, 0.0)

    assert policy.backlog.num_outstanding(W) == 0


def test_requests_of_a_removed_instance_are_forgotten():
    policy = router(VARIANTS["quartz"], (W,))
    policy.submit(routed(0, tokens=9000), 0.0)
    policy.dispatch(0.0)
    policy.submit(routed(1, tokens=500), 0.0)
    policy.submit(routed(2, tokens=100), 0.0)

    left = policy.change_instances((X,), 1.0)

    assert [str(each.request_id) for each in left] == ["2", "1"]
    assert policy.instances == [X]
    assert policy.dispatch(1.0) == []
    assert policy.backlog.num_outstanding(W) == 0
    policy.submit(left[0], 1.0)
    assert order_of(policy) == ["2"]


def test_a_new_instance_is_used_at_once():
    policy = router(VARIANTS["fifo-ll"], (W,))
    policy.submit(routed(0), 0.0)
    assert policy.change_instances((W, X), 0.0) == []
    policy.submit(routed(1), 0.0)

    assert {str(each.instance_id) for each in policy.dispatch(0.0)} == {str(W), str(X)}


def test_requests_sent_long_ago_are_forgotten():
    policy = router(VARIANTS["fifo-ll"], (W, X))
    for number in range(3):
        policy.submit(routed(number, at=number), number)
        policy.dispatch(number)
    policy.forget(1.5, 100.0)
    policy.submit(routed(9, at=100.0), 100.0)

    (sent,) = policy.dispatch(100.0)
    assert sent.instance_id == X  # Instance W still has the request that was assigned last.


def test_a_request_routed_again_is_expected_once():
    """The broker redelivered a request whose inbox, and then whose lane, was deleted."""
    policy = router(VARIANTS["default"], (W,))
    for at in range(3):
        policy.submit(routed(1), at)
        policy.dispatch(at)
    policy.finish(RequestId("1"), 3.0)

    assert policy.backlog.num_outstanding(W) == 0
    assert policy.backlog.is_idle(W)
    (sent,) = (policy.submit(routed(2), 3.0), *policy.dispatch(3.0))[1:]
    assert sent.request.request_id == "2"


def test_a_second_first_token_is_ignored():
    policy = router(VARIANTS["default"], (W,))
    policy.submit(routed(1), 0.0)
    policy.dispatch(0.0)

    assert policy.first_token(RequestId("1"), 1.0) is not None
    assert policy.first_token(RequestId("1"), 2.0) is None
