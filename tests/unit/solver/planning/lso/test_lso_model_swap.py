"""QLM §5's rules for a head of another model: which runs may finish, which are evicted."""

import pytest

from shared.contracts.base import RequestId
from solver.planning.lso.operations import Activate, Rule
from solver.planning.lso.situation import SwappedWork
from tests.unit.solver.planning.chosen_lsos import actions, brief
from tests.unit.solver.planning.situations import A, B, running, segment


class TestModelSwap:
    def test_the_heads_model_becomes_the_active_one(self):
        assert brief(actions((segment(B),))) == [("activate", B)]

    def test_the_first_model_is_activated_without_a_drain(self):
        (lso,) = actions((segment(B),), active=None)

        assert isinstance(lso, Activate)
        assert lso.drain_s == 0.0

    def test_an_active_model_is_not_activated_again(self):
        assert actions((segment(A), segment(B)), running=(running("r"),)) == ()

    def test_runs_that_are_cheap_to_recompute_are_evicted(self):
        """Recomputing the run's 100 tokens costs 0.1 s; waiting for its end costs 4 s."""
        lsos = actions((segment(B),), running=(running("r", remaining_s=4.0),))

        assert brief(lsos) == [("evict", ("r",)), ("activate", B)]
        assert lsos[0].reason.rule is Rule.EVICT_CHEAPER

    def test_runs_without_a_returning_model_may_finish_despite_cheap_recompute(self):
        work = (running("r", remaining_s=4.0),)
        for_good = actions((segment(B),), running=work, return_s=5.0)
        for_a_while = actions((segment(B), segment(A)), running=work, return_s=5.0)

        assert brief(for_good) == [("activate", B)]
        assert brief(for_a_while) == [("evict", ("r",)), ("activate", B)]

    def test_nearly_finished_runs_may_finish(self):
        (lso,) = actions((segment(B),), running=(running("r", remaining_s=0.01),))

        assert isinstance(lso, Activate)
        assert 0.01 <= lso.drain_s <= 0.05

    @pytest.mark.parametrize(
        ("activate_s", "kinds"),
        [
            (0.1, ["evict", "activate"]),
            (1.5, ["evict", "activate"]),
            (2.5, ["activate"]),
            (None, ["activate"]),
        ],
    )
    def test_no_run_outlasts_the_activation_of_the_head(
        self, activate_s: float | None, kinds: list[str]
    ):
        """The run would be late elsewhere, and ends in 2 s; an unknown time does not limit it."""
        work = (running("r", remaining_s=2.0, slack_s=0.5),)
        times = {} if activate_s is None else {B: activate_s}

        lsos = actions((segment(B), segment(A)), running=work, activate_s=times)

        assert [kind for kind, _ in brief(lsos)] == kinds

    def test_without_predictions_the_drain_limit_applies(self):
        (lso,) = actions((segment(B),), running=(running("r", remaining_s=None),))

        assert isinstance(lso, Activate)
        assert lso.drain_s == 5.0
        assert lso.reason.rule is Rule.PLANNED_BLIND
        assert lso.predicted_s is None

    def test_the_reason_compares_the_cheapest_with_draining_and_evicting_all(self):
        """Recomputing 100 tokens costs 0.1 s: one run may finish, the other is evicted."""
        work = (running("r", remaining_s=0.02), running("s", remaining_s=4.0))

        evict, activate = actions((segment(B),), running=work, activate_s={B: 2.0})

        assert evict.predicted_s == pytest.approx(0.1, rel=0.05)
        assert activate.predicted_s == pytest.approx(2.02)
        assert activate.reason.rule is Rule.PLANNED_CHEAPEST
        assert "draining all 4 s, evicting all 0.204 s" in activate.reason.text

    def test_swapped_out_requests_leave_with_their_model(self):
        """The model swap drops the requests' KV, so the instance could not resume them."""
        waiting = SwappedWork(request_id=RequestId("s"), needed_tokens=10)

        lsos = actions((segment(B),), swapped=(waiting,))

        assert brief(lsos) == [("evict", ("s",)), ("activate", B)]
        assert lsos[0].reason.rule is Rule.MODEL_LEAVES
