"""An engine knows which of its runs are past their ends before each iteration."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.base import RequestId
from solver.scheduling.run_ends import RunEnds

A, B = RequestId("a"), RequestId("b")


def test_run_ends_at_its_time():
    ends = RunEnds()
    ends.add(A, 10.0, None)

    assert ends.over(9.9, lambda _: True) == []
    assert ends.over(10.0, lambda _: True) == [A]


def test_run_with_a_token_outlives_the_deadline_of_the_first():
    ends = RunEnds()
    ends.add(A, None, 5.0)
    ends.add(B, 8.0, 5.0)

    assert ends.over(5.0, lambda _: True) == []
    assert ends.over(7.9, lambda _: True) == []
    assert ends.over(8.0, lambda _: True) == [B]


def test_run_without_a_token_ends_at_the_deadline_of_the_first():
    ends = RunEnds()
    ends.add(A, None, 5.0)
    ends.add(B, 8.0, 5.0)

    assert set(ends.over(5.0, lambda _: False)) == {A, B}


TIMES = st.none() | st.floats(0.0, 10.0)
STEPS = st.lists(st.tuples(st.integers(0, 5), TIMES, TIMES, st.floats(0.0, 2.0)), max_size=40)


@given(STEPS, st.sets(st.integers(0, 5)))
def test_runs_past_their_ends_are_found_and_no_others(
    steps: list[tuple[int, float | None, float | None, float]], begun: set[int]
):
    ends, expected, now = RunEnds(), dict[RequestId, float](), 0.0
    for number, expires_at, first_token_by, passed_s in steps:
        run = RequestId(str(number))
        ends.remove(run)
        ends.add(run, expires_at, first_token_by)
        first_s = math.inf if first_token_by is None or number in begun else first_token_by
        expected[run] = min(math.inf if expires_at is None else expires_at, first_s)
        now += passed_s
        over = ends.over(now, lambda name: int(name) in begun)

        assert set(over) == {name for name, at in expected.items() if at <= now}
        for name in over:
            ends.remove(name)
            del expected[name]
