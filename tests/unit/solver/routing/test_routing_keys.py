"""Dispatch keys, scores and candidate sets of QUARTZ."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver.routing.dispatch_key import Admission, KeyInputs, KeyWeights, dispatch_key
from solver.routing.placement import candidate_set, pressure_penalty_s, routing_score_s
from tests.routed import INSTANCES

PUBLISHED = KeyWeights(aging=0.02, fairness=0.10)
seconds = st.floats(0, 1e4)


def test_key_is_size_aged_by_arrival_plus_the_tenants_service():
    """Eqs 6-8 give 0.5 + 0.02 * 100 + 0.1 * 3 for a tenant with 3,000 tokens per second."""
    inputs = KeyInputs(arrived_at=100, deadline_at=102, size_s=0.5, service_rate_per_s=3000)

    assert dispatch_key(Admission.SIZE, PUBLISHED, inputs) == pytest.approx(2.8)


def test_of_equal_sizes_the_more_urgent_has_the_smaller_deadline_key():
    soon = KeyInputs(arrived_at=100, deadline_at=102, size_s=0.5, service_rate_per_s=0)
    late = replace(soon, arrived_at=99, deadline_at=103)

    assert dispatch_key(Admission.DEADLINE, PUBLISHED, soon) < dispatch_key(
        Admission.DEADLINE, PUBLISHED, late
    )


@pytest.mark.parametrize("admission", Admission)
@given(at=seconds, later_s=seconds, target_s=st.floats(0.1, 1e6), size_s=seconds)
def test_keys_age_monotonically(
    admission: Admission, at: float, later_s: float, target_s: float, size_s: float
):
    """The later of two equal requests is never dispatched first, for any target."""
    early = KeyInputs(
        arrived_at=at, deadline_at=at + target_s, size_s=size_s, service_rate_per_s=10
    )
    late = replace(early, arrived_at=at + later_s, deadline_at=at + later_s + target_s)

    assert dispatch_key(admission, PUBLISHED, early) <= dispatch_key(admission, PUBLISHED, late)


def test_a_missing_deadline_ages_like_any_other():
    none = KeyInputs(arrived_at=5, deadline_at=float("inf"), size_s=0.1, service_rate_per_s=0)

    assert dispatch_key(Admission.DEADLINE, PUBLISHED, none) == pytest.approx(0.1 + 0.02 * 65)


def test_score_adds_a_mean_wait_a_quantile_and_a_penalty():
    """The score is QUARTZ's equation 4."""
    score = routing_score_s(expected_wait_s=0.5, prefill_quantile_s=0.25, pressure_s=1.0)

    assert score == pytest.approx(1.75)


@given(one=st.floats(0, 1), other=st.floats(0, 1))
def test_pressure_never_falls_with_utilization(one: float, other: float):
    low, high = sorted((one, other))

    assert 0 <= pressure_penalty_s(low) <= pressure_penalty_s(high)
    assert pressure_penalty_s(0.9) == 0


@given(
    cached=st.dictionaries(st.sampled_from(INSTANCES), st.integers(0, 500)),
    count=st.one_of(st.none(), st.integers(1, 6)),
    seed=st.integers(0, 99),
)
def test_candidates_are_k_and_contain_the_longest_match(
    cached: dict[object, int], count: int | None, seed: int
):
    chosen = candidate_set(
        INSTANCES,
        cached_tokens=cached,  # type: ignore[arg-type]  # test data
        num_candidates=count,
        random=np.random.default_rng(seed),
    )
    longest = max(cached.values(), default=0)

    assert len(chosen) == len(set(chosen)) == min(count or 4, 4)
    assert not longest or longest in {cached.get(each, 0) for each in chosen}
