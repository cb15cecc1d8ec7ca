"""Totals of a situation, and the operations predicted from them."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import InstanceId, RequestId
from shared.contracts.plans import LaneQuota, Segment
from shared.contracts.situations import LsoFacts, RunningFacts
from shared.contracts.telemetry import InstanceStatus, ModelState, Residency
from solver.planning.lso.actions import lso_actions
from solver.planning.lso.facts import facts_of, typical_situation
from solver.planning.lso.operations import Lso
from solver.planning.lso.situation import Demand, HeadChange, RunningWork, Situation, SwappedWork
from tests.unit.solver.planning.groups import a_group
from tests.unit.solver.planning.situations import EVICTS, SWAPS, A, B, running, segment, situation

QUEUE = (segment(A, "urgent"), segment(A, "late"))


def status(facts: LsoFacts | None, **fields: Any) -> InstanceStatus:
    values: dict[str, Any] = {"incarnation": "x", "seq": 1, "at": 0.0, "engine": "e", "device": "d"}
    models = (
        ModelState(model=A, residency=Residency.ACTIVE),
        ModelState(model=B, residency=Residency.COLD, activate_s=2.0),
    )
    values |= {"model": A, "models": models, "lso": facts}
    return InstanceStatus(instance_id=InstanceId("i1"), **(values | fields))


def typical(known: Situation) -> Situation:
    """Situation that is rebuilt from the totals of *known* only."""
    return typical_situation(status(facts_of(known)), latency=known.costs.latency)


def shape(lso: Lso) -> tuple[object, ...]:
    ids = getattr(lso, "request_ids", ())
    return (lso.kind, len(ids), getattr(lso, "model", None), lso.reason.text)


def test_requests_are_counted_by_lane_and_gives_way():
    known = situation(
        running=(
            running("r", "x", 100),
            running("s", "y", 50, remaining_s=None),
            running("t", "x", 60, gives_way=True),
            running("u", "x", 300, remaining_s=2.5),
            running("v", "y", 50),
        )
    )

    assert facts_of(known).running == (
        RunningFacts(lane="x", requests=2, context_tokens=400, held_tokens=400, remaining_s=3.5),
        RunningFacts(
            lane="x",
            requests=1,
            context_tokens=60,
            held_tokens=60,
            gives_way=True,
            remaining_s=1.0,
        ),
        RunningFacts(lane="y", requests=2, context_tokens=100, held_tokens=100),
    )


def test_one_typical_request_represents_all_of_its_lane():
    known = situation(
        running=(
            running("r", "x", 100, slack_s=-1.0),
            running("s", "x", 300, remaining_s=3.0, slack_s=4.0),
            running("t", "y", 1, slack_s=4.0),
            running("u", "y", 1),
        ),
        swapped=tuple(
            SwappedWork(request_id=RequestId(name), needed_tokens=tokens, rested=name == "a")
            for name, tokens in (("a", 10), ("b", 30))
        ),
    )
    guess = typical(known)

    reported = [(work.context_tokens, work.remaining_s, work.slack_s) for work in guess.running]
    assert reported == [(200, 2.0, 1.5)] * 2 + [(1, 1.0, math.inf)] * 2
    assert len({work.request_id for work in guess.running}) == 4
    assert [(work.needed_tokens, work.rested) for work in guess.swapped] == [
        (20, False),
        (20, True),
    ]


def test_models_and_activation_times_come_from_the_status():
    guess = typical(situation())

    assert guess.active == A
    assert guess.warm_set.residency == {A: Residency.ACTIVE, B: Residency.COLD}
    assert guess.activate_s == {A: 0.0, B: 2.0}


def _eighths(number: int) -> float:
    """Times that are exact in binary, so that the mean of equal times is exactly the time."""
    return number / 8


@st.composite
def _lanes_alike(draw: st.DrawFn) -> Situation:
    """Situations in which all requests of a lane are equal."""
    work: list[RunningWork] = []
    for lane in draw(st.lists(st.sampled_from(["urgent", "late", "gone"]), unique=True)):
        tokens = draw(st.integers(1, 5000))
        remaining_s = draw(st.none() | st.integers(0, 72).map(_eighths))
        gives_way = draw(st.booleans())
        slack_s = draw(st.just(math.inf) | st.integers(-72, 72).map(_eighths))
        work += [
            running(
                f"{lane}#{n}",
                lane,
                tokens,
                remaining_s=remaining_s,
                gives_way=gives_way,
                slack_s=slack_s,
            )
            for n in range(draw(st.integers(1, 4)))
        ]
    return situation(
        running=tuple(work),
        costs=draw(st.sampled_from([EVICTS, SWAPS])),
        demand=Demand(tokens=draw(st.integers(0, 9000)), slots=draw(st.integers(0, 9))),
        free_tokens=draw(st.integers(0, 2000)),
        free_slots=draw(st.integers(0, 3)),
        host_kv_free_bytes=draw(st.integers(0, 10_000_000)),
        pull_room=draw(st.integers(0, 3)),
        activate_s={A: 0.0, B: 2.0},
        return_s=draw(st.sampled_from([0.0, 3.0])),
    )


@given(_lanes_alike(), st.sampled_from([QUEUE, (segment(B, "z"), segment(A, "late"))]))
def test_totals_of_equal_requests_lead_to_the_same_operations(
    known: Situation, queue: tuple[Segment, ...]
):
    change = HeadChange(old_head=None, queue=queue)

    assert [shape(lso) for lso in lso_actions(change, typical(known))] == [
        shape(lso) for lso in lso_actions(change, known)
    ]


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 9000), st.booleans()), max_size=30)
)
def test_totals_are_preserved_up_to_rounding(work: list[tuple[str, int, bool]]):
    known = situation(
        running=tuple(
            running(str(number), lane, tokens, gives_way=gives_way)
            for number, (lane, tokens, gives_way) in enumerate(work)
        )
    )
    reported, again = facts_of(known).running, facts_of(typical(known)).running

    assert [(each.lane, each.gives_way, each.requests) for each in reported] == [
        (each.lane, each.gives_way, each.requests) for each in again
    ]
    for before, after in zip(reported, again, strict=True):
        assert abs(before.context_tokens - after.context_tokens) <= before.requests / 2


class TestComing:
    """Requests of the head that are not yet in the window add to the demand."""

    FACTS = LsoFacts(demand_tokens=50, demand_slots=1, free_slots=8, pull_room=16)

    @pytest.mark.parametrize(
        ("sizes", "expected"),
        [
            ((), Demand(tokens=50, slots=1)),
            ((10,), Demand(tokens=1050, slots=11)),
            ((10, 10), Demand(tokens=1650, slots=17)),
        ],
        ids=["nothing", "all", "as far as there is room"],
    )
    def test_requests_to_be_pulled_count_as_waiting(self, sizes: tuple[int, ...], expected: Demand):
        coming = [a_group(A, number, num_requests=size) for number, size in enumerate(sizes)]

        assert typical_situation(status(self.FACTS), latency=None, coming=coming).demand == expected

    def test_coming_best_effort_displaces_no_request(self):
        best_effort = a_group(A, oldest_deadline_at=math.inf, youngest_deadline_at=math.inf)
        guess = typical_situation(status(self.FACTS), latency=None, coming=[best_effort])

        assert guess.demand == Demand(tokens=50, slots=1)


def test_swap_preview_without_reported_durations_omits_the_duration():
    head = Segment(model=B, lanes=(LaneQuota(lane="z", quota=3),))
    guess = typical_situation(status(None, running=2, swapped_out=1), latency=None)
    lsos = lso_actions(HeadChange(old_head=None, queue=(head,)), guess)

    assert [(lso.kind, lso.predicted_s) for lso in lsos] == [("evict", None), ("activate", None)]
