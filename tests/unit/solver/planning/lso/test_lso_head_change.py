"""QLM §5's rules for a new head of the same model: which runs are displaced, which resume."""

from typing import Any, ClassVar

import pytest

from shared.contracts.base import RequestId
from shared.contracts.plans import Segment
from solver.planning.lso.evict_or_swap import KvCosts
from solver.planning.lso.operations import SwapIn
from solver.planning.lso.situation import Demand, SwappedWork
from tests.unit.solver.planning.chosen_lsos import actions, brief
from tests.unit.solver.planning.situations import EVICTS, SWAPS, A, running, segment


class TestHeadChange:
    """A new head's work does not fit, so running work is displaced."""

    QUEUE: ClassVar[tuple[Segment, ...]] = (segment(A, "urgent"), segment(A, "late"))
    NEED = Demand(tokens=150, slots=1)

    @pytest.mark.parametrize(
        ("costs", "expected"),
        [(EVICTS, ("evict", ("late",))), (SWAPS, ("swap_out", "late"))],
        ids=["evict", "swap"],
    )
    def test_the_displaced_group_is_evicted_or_swapped_out(
        self, costs: KvCosts, expected: tuple[Any, ...]
    ):
        work = (running("urgent", "urgent", 100), running("late", "late", 100))

        lsos = actions(self.QUEUE, running=work, demand=self.NEED, free_tokens=50, costs=costs)

        assert brief(lsos) == [expected]
        facts = dict(lsos[0].reason.facts)
        cost = "transfer_s" if costs is SWAPS else "recompute_s"
        assert (lsos[0].predicted_s, facts["recompute_s"] > facts["transfer_s"]) == (
            facts[cost],
            True,
        )

    def test_no_work_is_removed_while_the_head_fits(self):
        work = (running("late", "late"),)

        assert actions(self.QUEUE, running=work, demand=self.NEED, free_tokens=150) == ()

    def test_no_work_is_removed_that_would_lose_its_tokens(self):
        work = (running("late", "late", 100), running("dump", "any", 50, gives_way=True))

        assert (
            actions(self.QUEUE, running=work, demand=self.NEED, free_tokens=50, resumes=False) == ()
        )

    def test_no_work_is_removed_that_would_take_the_room_again(self):
        work = (
            running("late", "late", 100, begins_first=True),
            running("dump", "any", 300, gives_way=True, begins_first=True),
            running("last", "late", 200),
        )

        lsos = actions(self.QUEUE, running=work, demand=self.NEED, free_tokens=50)

        assert brief(lsos) == [("evict", ("last",))]

    def test_only_the_needed_work_is_removed_the_least_loss_first(self):
        work = (running("big", "late", 400), running("mid", "late", 60), running("wee", "late", 50))

        lsos = actions(self.QUEUE, running=work, demand=self.NEED, free_tokens=50)

        assert brief(lsos) == [("evict", ("wee",)), ("evict", ("mid",))]

    def test_missing_slots_also_count_as_room(self):
        lsos = actions(self.QUEUE, running=(running("r", "late"),), demand=self.NEED, free_slots=0)

        assert brief(lsos) == [("evict", ("r",))]

    def test_best_effort_and_relegated_work_is_removed_first(self):
        work = (running("late", "late", 10), running("dump", "any", 500, gives_way=True))

        lsos = actions(self.QUEUE, running=work, demand=self.NEED, free_tokens=50)

        assert brief(lsos) == [("evict", ("dump",))]

    def test_work_of_a_lane_that_left_the_queue_stays(self):
        """The plan omits an empty lane although the lane's last requests still run."""
        work = (running("last", "emptied"),)

        assert actions(self.QUEUE, running=work, demand=self.NEED, free_tokens=0) == ()

    def test_swapped_out_requests_share_host_memory(self):
        """Host memory has room for the KV of only one request."""
        work = (running("one", "late", 100), running("two", "late", 101))

        lsos = actions(
            self.QUEUE,
            running=work,
            demand=Demand(tokens=180, slots=1),
            free_tokens=0,
            costs=SWAPS,
            host_kv_free_bytes=150_000,
        )

        assert brief(lsos) == [("swap_out", "one"), ("evict", ("two",))]
        assert "do not fit into host memory" in lsos[1].reason.text

    def test_swapped_out_work_is_resumed_in_the_room_left_by_the_head(self):
        waiting = tuple(
            SwappedWork(request_id=RequestId(name), needed_tokens=400)
            for name in ("first", "second", "third")
        )

        lsos = actions(self.QUEUE, swapped=waiting, demand=self.NEED, free_tokens=1000)

        assert [lso.request_id for lso in lsos if isinstance(lso, SwapIn)] == ["first", "second"]

    def test_resting_requests_are_not_resumed(self):
        """An operator has swapped the request out for a fixed time."""
        waiting = SwappedWork(request_id=RequestId("r"), needed_tokens=4, rested=False)

        assert actions(self.QUEUE, swapped=(waiting,)) == ()
