"""Tenants' service counters."""

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import TenantId
from solver.routing.service_counters import ServiceCounters

A, B = TenantId("a"), TenantId("b")


def test_counters_decay_with_their_time_constant():
    counters = ServiceCounters(memory_s=10)
    counters.count(A, 1000, 0.0)

    assert counters.tokens(A, 10.0) == pytest.approx(1000 / exp(1))
    assert counters.tokens(B, 10.0) == 0


def test_a_steady_rate_is_reported_as_steady():
    counters = ServiceCounters(memory_s=10)
    for number in range(1000):
        counters.count(A, 100, number * 0.1)

    assert counters.rate_per_s(A, 99.95) == pytest.approx(1000, rel=0.01)


@given(
    served=st.lists(
        st.tuples(st.sampled_from([A, B]), st.integers(1, 10_000), st.floats(0, 100)), max_size=50
    )
)
def test_counters_are_bounded_by_the_service(served: list[tuple[TenantId, int, float]]):
    """A counter is never negative or above the served total, at times in any order."""
    counters = ServiceCounters(memory_s=10)
    for tenant, tokens, at in served:
        counters.count(tenant, tokens, at)
    for tenant in (A, B):
        total = sum(tokens for each, tokens, _ in served if each == tenant)
        assert 0 <= counters.tokens(tenant, 100) <= total * (1 + 1e-9)


def test_idle_tenants_are_forgotten():
    counters = ServiceCounters(memory_s=10, idle_tokens=1)
    counters.count(A, 1000, 0.0)
    counters.count(B, 1000, 200.0)

    assert len(counters) == 1
