"""Preview of operations before an instance executes them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from shared.contracts.base import ModelName, RequestId
from shared.contracts.plans import PlannedLso, Segment
from shared.contracts.telemetry import Residency
from solver.planning.lso.actions import RULES
from solver.planning.lso.operations import Lso
from solver.planning.lso.preview import preview_operations
from solver.planning.lso.situation import Demand, HeadChange, Situation, SwappedWork, WarmSet
from tests.unit.solver.planning.situations import (
    EVICTS,
    SWAPS,
    A,
    B,
    C,
    running,
    segment,
    situation,
)

QUEUE = (segment(A, "urgent"), segment(A, "late"))


def forecasted(queue: tuple[Segment, ...], **fields: Any) -> tuple[PlannedLso, ...]:
    return preview_operations(HeadChange(old_head=None, queue=queue), situation(**fields))


def brief(lsos: tuple[PlannedLso, ...]) -> list[tuple[str, int, str]]:
    return [(lso.lso, lso.requests, lso.subject) for lso in lsos]


def test_operations_on_requests_of_one_lane_are_merged():
    work = tuple(running(f"late{n}", "late", 100) for n in range(4))
    (evict,) = forecasted(QUEUE, running=work, demand=Demand(tokens=250, slots=3), free_tokens=0)

    assert brief((evict,)) == [("evict", 3, "late")]
    assert evict.reason.startswith("the head lacks 250 tokens")
    assert evict.predicted_s == pytest.approx(3 * evict.figures["recompute_s"])


def test_operations_on_several_lanes_are_separate():
    work = (running("r", "late", 100), running("f", "dump", 500, gives_way=True))
    lsos = forecasted(QUEUE, running=work, demand=Demand(tokens=600, slots=1), free_tokens=0)

    assert brief(lsos) == [("evict", 1, "dump"), ("evict", 1, "late")]


@pytest.mark.parametrize("costs", [EVICTS, SWAPS], ids=["evict", "swap_out"])
def test_both_costs_of_making_room_are_in_the_reason(costs: Any, request: pytest.FixtureRequest):
    (lso,) = forecasted(
        QUEUE,
        running=(running("r", "late", 100),),
        demand=Demand(tokens=1100, slots=1),
        costs=costs,
    )

    assert lso.lso == request.node.callspec.id
    assert lso.figures["recompute_s"] == pytest.approx(0.1, rel=0.05)
    assert lso.figures["transfer_s"] == pytest.approx(1e-4)
    assert f"recomputing costs {lso.figures['recompute_s']:.3g} s" in lso.reason


def test_a_model_swap_preview_lists_evictions_followers_and_costs():
    lsos = forecasted(
        (segment(B, "x"), segment(C)),
        running=(running("r", "x", remaining_s=4.0), running("s", "y", remaining_s=4.0)),
        swapped=(SwappedWork(request_id=RequestId("w"), needed_tokens=9),),
        activate_s={B: 2.0},
        warm_set=WarmSet(residency={C: Residency.COLD}, num_bytes={C: 5}, budget_bytes=9),
        pull_room=3,
    )

    assert brief(lsos) == [
        ("evict", 1, "swapped-out requests"),
        ("evict", 2, "x, y"),
        ("activate", 0, "b"),
        ("warm", 0, "c"),
        ("pull", 0, "count 3"),
    ]
    assert lsos[2].predicted_s == 2.0
    assert {"drain_all_s", "evict_all_s"} <= lsos[2].figures.keys()


def test_operations_that_would_not_run_are_omitted():
    assert forecasted((segment(A),), running=(running("r"),)) == ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dance(Lso):
    kind: ClassVar[str] = "dance"
    model: ModelName
    pace_s: float = 0.0
    request_id: RequestId


def dance(_change: HeadChange, known: Situation) -> Iterator[Lso]:
    for work in known.running:
        yield Dance(model=A, pace_s=0.25, request_id=work.request_id, predicted_s=1.0)


def test_an_unknown_kind_is_previewed_with_all_its_fields():
    work = (running("r", "x"), running("s", "x"))
    change = HeadChange(old_head=None, queue=(segment(B),))
    lsos = preview_operations(change, situation(running=work), rules=(*RULES, dance))

    assert lsos[-1] == PlannedLso(
        lso="dance",
        subject="x, a, pace_s 0.25",
        requests=2,
        reason="an operator ordered the operation",
        predicted_s=2.0,
    )
