"""Whatever happened to a request: its life has no gaps, and its sentence names time that passed."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.qos import Slo
from shared.contracts.requests import HistoryEntry
from shared.contracts.stories.story import COMPLETED, Story
from solver.stories.lost_time import lost_time
from solver.stories.sentence import seconds, sentence_of
from solver.stories.timeline import Step, timeline
from tests.clocks import NOW
from tests.unit.solver.stories.lives import A0, A1, a_story

TIMES = st.floats(0.0, 100.0).map(lambda after: round(after, 3))
MAYBE = st.none() | TIMES.map(lambda after: NOW + after)
STEPS = st.builds(
    HistoryEntry,
    at=TIMES.map(lambda after: NOW + after),
    instance_id=st.sampled_from((A0, A1)),
    what=st.sampled_from([*(step.value for step in Step), "unknown"]),
    why=st.sampled_from(("", "reason")),
    pulled_at=MAYBE,
    begun_at=MAYBE,
)
TARGETS = st.none() | st.floats(0.01, 50.0)
SLOS = st.builds(Slo, ttft_s=TARGETS, tbt_s=TARGETS, ttlt_s=TARGETS)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Records with any times; the verdict is as instances give it."""
    times, slo = [draw(TIMES) for _ in range(5)], draw(SLOS)
    finished = max(times)
    return a_story(
        *times[:4],
        finished,
        slo=slo,
        history=tuple(draw(st.lists(STEPS, max_size=6))),
        outcome=draw(st.sampled_from((COMPLETED, "deadline_expired", "cancelled"))),
        output_tokens=draw(st.integers(0, 200)),
        late_tokens=draw(st.integers(0, 3)),
        max_tbt_s=draw(st.floats(0.0, 20.0)),
        prefill_s=draw(st.floats(0.0, 20.0)),
        attained=draw(st.booleans()),
    )


@given(stories())
def test_the_phases_fill_the_life_without_gaps(story: Story):
    stretches = timeline(story)

    assert all(each.duration_s > 0 for each in stretches)
    for one, following in pairwise(stretches):
        assert one.ended_at == following.begun_at
    if stretches:
        assert (stretches[0].begun_at, stretches[-1].ended_at) == (NOW, story.finished_at)


@given(stories())
def test_the_sentence_names_a_phase_that_took_the_time_that_it_says(story: Story):
    spent = dict[str, float]()
    for each in timeline(story):
        spent[each.phase.value] = spent.get(each.phase.value, 0.0) + each.duration_s
    shares = lost_time(story)

    assert bool(shares) == (story.is_late and bool(spent))
    for share in shares:
        assert 0 < share.lost_s <= spent[share.phase.value] + 1e-6
        assert share.longest.phase is share.phase
    if shares:
        assert max(share.lost_s for share in shares) == shares[0].lost_s
        assert seconds(shares[0].lost_s) in sentence_of(story)


@given(stories())
def test_the_shares_are_at_least_the_lateness_and_at_most_the_life(story: Story):
    lost_s = sum(share.lost_s for share in lost_time(story))
    late_s = 0.0
    if story.is_late and story.outcome == COMPLETED:
        at = story.slo.completion_deadline_at(NOW)
        late_s = 0.0 if math.isinf(at) else max(0.0, story.finished_at - at)

    assert lost_s <= story.finished_at - NOW + 1e-6
    assert lost_s >= min(late_s, story.finished_at - NOW) - 1e-6


@given(stories())
def test_a_sentence_is_one_line_that_ends_with_a_full_stop(story: Story):
    sentence = sentence_of(story)

    assert sentence.endswith(".")
    assert "\n" not in sentence
