"""All rules of QLM §5 together, as rows of one table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from shared.contracts.telemetry import Residency
from solver.planning.lso.actions import RULES, lso_actions
from solver.planning.lso.operations import Activate, Evict, Lso, Pull, SwapOut
from solver.planning.lso.situation import HeadChange, Situation, WarmSet
from tests.unit.solver.planning.chosen_lsos import actions
from tests.unit.solver.planning.situations import B, C, running, segment, situation


def test_every_operation_has_a_reason():
    lsos = actions(
        (segment(B, "x"), segment(C)),
        running=(running("r", remaining_s=4.0),),
        pull_room=1,
        warm_set=WarmSet(residency={C: Residency.COLD}, num_bytes={C: 5}, budget_bytes=9),
    )

    assert [lso.kind for lso in lsos] == ["evict", "activate", "warm", "pull"]
    for lso in lsos:
        assert "{" not in lso.reason.text


def test_a_new_kind_needs_only_one_more_rule():
    """A new kind of operation needs no change in callers of the table."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Dance(Lso):
        kind: ClassVar[str] = "dance"

    def dance(_change: HeadChange, _situation: Situation) -> Iterator[Lso]:
        yield Dance()

    change = HeadChange(old_head=None, queue=(segment(B),))

    kinds = [lso.kind for lso in lso_actions(change, situation(), rules=(*RULES, dance))]

    assert kinds == ["activate", "dance"]


def test_evictions_come_before_operations_that_need_their_room():
    lsos = actions((segment(B, "x"),), running=(running("r", remaining_s=4.0),), pull_room=2)

    assert [type(lso) for lso in lsos] == [Evict, Activate, Pull]
    assert not any(isinstance(lso, SwapOut) for lso in lsos)
