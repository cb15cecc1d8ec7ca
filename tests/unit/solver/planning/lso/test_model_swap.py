"""Drain or evict: the cheapest way to empty an instance."""

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import RequestId
from solver.planning.lso.model_swap import PATIENCE, Leaving, cheapest_drain


def leaving(name: str, remaining_s: float | None, resume_s: float) -> Leaving:
    return Leaving(request_id=RequestId(name), remaining_s=remaining_s, resume_s=resume_s)


@pytest.mark.parametrize(
    ("runs", "limit_s", "drain_s", "evicted"),
    [
        pytest.param([], 5.0, 0.0, (), id="nothing runs"),
        pytest.param([("a", 0.1, 1.0)], 5.0, 0.1, (), id="nearly done"),
        pytest.param([("a", 4.0, 1.0)], 5.0, 0.0, ("a",), id="quick to recompute"),
        pytest.param([("a", 9.0, 90.0)], 5.0, 0.0, ("a",), id="beyond the limit"),
        pytest.param([("a", 0.1, 1.0), ("b", 3.0, 1.0)], 5.0, 0.1, ("b",), id="one of each"),
        pytest.param(
            [("a", 2.0, 1.5), ("b", 2.1, 1.5)], 5.0, 2.1, (), id="several share one drain"
        ),
        pytest.param([("a", 0.1, 1.0)], 0.0, 0.0, ("a",), id="no time to drain"),
    ],
)
def test_runs_may_finish_where_this_is_cheapest(
    runs: list[tuple[str, float, float]], limit_s: float, drain_s: float, evicted: tuple[str, ...]
):
    plan = cheapest_drain([leaving(*run) for run in runs], limit_s=limit_s)

    assert (plan.predicted_s, plan.evicted) == (drain_s, evicted)
    assert plan.drain_s == min(limit_s, PATIENCE * drain_s)


def test_without_predictions_all_may_finish_until_the_limit():
    plan = cheapest_drain([leaving("a", None, 1.0), leaving("b", 50.0, 0.0)], limit_s=3.0)

    assert (plan.drain_s, plan.evicted, plan.is_predicted) == (3.0, (), False)


def test_plans_include_the_costs_of_draining_all_and_evicting_all():
    plan = cheapest_drain(
        [leaving("a", 0.1, 1.0), leaving("b", 3.0, 0.5)], limit_s=5.0, return_s=0.25
    )

    assert plan.total_s == 0.1 + 0.5 + 0.25
    assert (plan.drain_all_s, plan.evict_all_s, plan.is_predicted) == (3.0, 1.75, True)
    assert cheapest_drain([], limit_s=5.0, return_s=0.25).evict_all_s == 0.0


class TestComingBack:
    """One run that needs 4 s more and could be recomputed in 0.1 s."""

    RUN = leaving("a", 4.0, 0.1)

    def test_runs_may_finish_if_no_plan_brings_the_model_back(self):
        plan = cheapest_drain([self.RUN], limit_s=5.0, return_s=6.0)

        assert (plan.predicted_s, plan.evicted, plan.return_s) == (4.0, (), 0.0)

    def test_a_model_that_returns_soon_is_drained_at_once(self):
        plan = cheapest_drain([self.RUN], limit_s=5.0, return_s=1.0)

        assert (plan.evicted, plan.return_s) == (("a",), 1.0)

    def test_runs_beyond_the_limit_are_not_awaited(self):
        plan = cheapest_drain([self.RUN], limit_s=3.0, return_s=100.0)

        assert plan.evicted == ("a",)


class TestDeadlines:
    @pytest.mark.parametrize(
        ("slack_s", "evicted"),
        [
            pytest.param(2.0, (), id="would be late elsewhere"),
            pytest.param(60.0, ("a",), id="can wait"),
            pytest.param(-1.0, ("a",), id="late anyway"),
        ],
    )
    def test_runs_that_eviction_would_make_late_may_finish(
        self, slack_s: float, evicted: tuple[str, ...]
    ):
        run = Leaving(request_id=RequestId("a"), remaining_s=4.0, resume_s=0.1, slack_s=slack_s)

        assert cheapest_drain([run], limit_s=5.0).evicted == evicted


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20)), max_size=6), st.floats(0, 15))
def test_no_other_selection_of_runs_is_cheaper(times: list[tuple[float, float]], limit_s: float):
    runs = [leaving(str(n), remaining, resume) for n, (remaining, resume) in enumerate(times)]
    plan = cheapest_drain(runs, limit_s=limit_s)
    every = chain.from_iterable(combinations(runs, size) for size in range(len(runs) + 1))
    costs = [
        max((run.remaining_s or 0.0 for run in stay), default=0.0)
        + sum(run.resume_s for run in runs if run not in stay)
        for stay in every
        if all((run.remaining_s or 0.0) <= limit_s for run in stay)
    ]

    assert plan.predicted_s + plan.recompute_s == pytest.approx(min(costs))
