"""ConServe's algorithm 2: when an arriving request preempts the running iteration."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from solver.scheduling.engine.layer_preemption import RunningIteration, preempts

SECONDS = st.floats(0, 10)
MORE = st.floats(0, 5)


@st.composite
def iterations(draw: st.DrawFn, least_offline: int = 1) -> RunningIteration:
    predicted_s = draw(SECONDS)
    return RunningIteration(
        began_at=draw(SECONDS),
        predicted_s=predicted_s,
        decodes_s=draw(st.floats(0, predicted_s)),
        online_tokens=draw(st.integers(0, 4096)),
        offline_tokens=draw(st.integers(least_offline, 4096)),
    )


@given(iterations(0), SECONDS, SECONDS, st.floats(-10, 10))
def test_nothing_is_dropped_without_offline_work(
    iteration: RunningIteration, now: float, online_s: float, slack_s: float
) -> None:
    online = replace(iteration, offline_tokens=0)

    assert not preempts(online, now=now, online_s=online_s, slack_s=slack_s)


@given(iterations(), SECONDS, SECONDS, SECONDS, MORE)
def test_an_iteration_preempted_at_one_time_is_also_preempted_earlier(
    iteration: RunningIteration, now: float, online_s: float, slack_s: float, earlier_s: float
) -> None:
    later = preempts(iteration, now=now, online_s=online_s, slack_s=slack_s)
    earlier = preempts(iteration, now=now - earlier_s, online_s=online_s, slack_s=slack_s)

    assert earlier or not later


@given(iterations(), SECONDS, SECONDS, SECONDS, MORE)
def test_more_slack_never_adds_a_cut(
    iteration: RunningIteration, now: float, online_s: float, slack_s: float, more_s: float
) -> None:
    tight = preempts(iteration, now=now, online_s=online_s, slack_s=slack_s)
    loose = preempts(iteration, now=now, online_s=online_s, slack_s=slack_s + more_s)

    assert tight or not loose


@given(iterations(), SECONDS, SECONDS, SECONDS, MORE)
def test_more_online_work_never_removes_a_cut(
    iteration: RunningIteration, now: float, online_s: float, slack_s: float, more_s: float
) -> None:
    little = preempts(iteration, now=now, online_s=online_s, slack_s=slack_s)
    much = preempts(iteration, now=now, online_s=online_s + more_s, slack_s=slack_s)

    assert much or not little


@given(iterations(), SECONDS, SECONDS, st.floats(-10, 10))
def test_an_overdue_iteration_may_finish(
    iteration: RunningIteration, overdue_s: float, online_s: float, slack_s: float
) -> None:
    now = iteration.began_at + iteration.predicted_s + overdue_s

    assert not preempts(iteration, now=now, online_s=online_s, slack_s=slack_s)


@given(iterations(), SECONDS, SECONDS, st.floats(-10, 10), st.floats(1e-3, 5))
def test_a_request_that_cannot_be_in_time_cuts_no_iteration(
    iteration: RunningIteration, now: float, online_s: float, slack_s: float, too_long_s: float
) -> None:
    prefill_s = slack_s + too_long_s

    assert not preempts(iteration, now=now, online_s=online_s, slack_s=slack_s, prefill_s=prefill_s)


def test_decodes_make_prefills_longer() -> None:
    """Decodes take half of each iteration: 0.5 s remain, and a prefill of 0.2 s takes 0.4 s."""
    iteration = RunningIteration(began_at=0.0, predicted_s=1.0, decodes_s=0.5, offline_tokens=9)
    alone = replace(iteration, decodes_s=0.0)

    assert preempts(iteration, now=0.5, online_s=0.2, slack_s=0.8)
    assert not preempts(iteration, now=0.5, online_s=0.2, slack_s=1.0)
    assert not preempts(alone, now=0.5, online_s=0.2, slack_s=0.8)
