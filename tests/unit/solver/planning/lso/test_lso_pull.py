"""QLM §5's rules for immediate pulls: from which lanes, and how many requests."""

import pytest

from shared.contracts.plans import Segment
from solver.planning.lso.actions import lso_actions
from solver.planning.lso.operations import Pull
from solver.planning.lso.situation import HeadChange
from tests.unit.solver.planning.chosen_lsos import actions
from tests.unit.solver.planning.situations import A, B, running, segment, situation


class TestPull:
    def test_a_head_with_members_is_pulled_from_up_to_the_room(self):
        (lso,) = actions((segment(A, "x"),), pull_room=3)

        assert isinstance(lso, Pull)
        assert lso.count == 3

    @pytest.mark.parametrize(("queue", "room"), [((segment(A, "x"),), 0), ((segment(A),), 3)])
    def test_without_room_or_members_there_is_no_pull(self, queue: tuple[Segment, ...], room: int):
        assert actions(queue, pull_room=room) == ()

    @pytest.mark.parametrize(
        ("old", "pulls"),
        [
            (None, True),
            (segment(A, "y"), True),
            (segment(B, "x"), True),
            (segment(A, "x", "y"), False),
        ],
        ids=["first plan", "other group", "other model", "the same"],
    )
    def test_only_new_groups_of_the_head_are_pulled_from_at_once(
        self, old: Segment | None, *, pulls: bool
    ):
        change = HeadChange(old_head=old, queue=(segment(A, "x"),))

        assert bool(lso_actions(change, situation(pull_room=3))) is pulls

    def test_an_empty_queue_needs_no_operation(self):
        assert actions((), pull_room=3, running=(running("r"),)) == ()
