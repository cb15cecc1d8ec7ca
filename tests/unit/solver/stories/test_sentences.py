"""The sentence about a request names the cause with the largest share of the lost time."""

import msgspec
import pytest

from shared.contracts.qos import Slo
from shared.contracts.requests import WaitForecast
from shared.contracts.stories.story import Story
from solver.planning.lso.operations import Rule, because
from solver.stories.lost_time import lost_time
from solver.stories.sentence import seconds, sentence_of
from tests.clocks import NOW
from tests.unit.solver.stories.lives import A1, a_step, a_story

PACED = Slo(ttft_s=3.0, tbt_s=0.1)
WHOLE = Slo(ttlt_s=10.0)
HEAD = because(Rule.HEAD_NEEDS_ROOM, lack_tokens=9, lack_slots=1, verdict="it cannot wait").text
EXAMPLES = {
    "lane": (
        a_story(0.1, 4.0, 4.2, 5.0, 6.0, predicted_wait=WaitForecast(mean_s=2.0, sd_s=1.0)),
        (
            "Its first token came 4.0 s late because it waited 3.9 s in its lane, where work with "
            "nearer deadlines is served first (2.0 s were predicted)."
        ),
    ),
    "lane, then relegated": (
        a_story(0.0, 5.0, 5.0, 6.0, 7.0, history=(a_step("relegated", 4.0, pulled=4.0),)),
        (
            "Its first token came 5.0 s late because it waited 4.0 s in its lane, where work with "
            "nearer deadlines is served first, and a0 relegated it then."
        ),
    ),
    "overflow": (
        a_story(0.1, 4.0, 4.2, 5.0, 6.0, queue="overflow.2.tiny.high.3.w0"),
        (
            "Its first token came 4.0 s late because it waited 3.9 s in overflow.2.tiny.high.3.w0: "
            "its tenant was above its share."
        ),
    ),
    "inbox": (
        a_story(0.1, 4.0, 4.2, 5.0, 6.0, queue="inbox.a1"),
        (
            "Its first token came 4.0 s late because it waited 3.9 s in inbox.a1, behind requests "
            "that were sent there before."
        ),
    ),
    "grouper": (
        a_story(4.0, 4.5, 4.5, 5.0, 6.0),
        "Its first token came 4.0 s late because it waited 4.0 s for a grouper.",
    ),
    "window": (
        a_story(0.1, 0.2, 4.2, 5.0, 6.0),
        "Its first token came 4.0 s late because it waited 4.0 s on a1 for room in the engine.",
    ),
    "engine": (
        a_story(0.1, 0.2, 0.3, 5.0, 6.0, prefill_s=0.7),
        (
            "Its first token came 4.0 s late because it waited 4.0 s in the engine of a1, behind "
            "the prefills of others."
        ),
    ),
    "prefill": (
        a_story(0.1, 0.2, 0.3, 5.0, 6.0, prefill_s=4.5, prompt_tokens=9000),
        "Its first token came 4.0 s late because the prefill of its 9000 tokens took 4.5 s on a1.",
    ),
    "model swap": (
        a_story(0.0, 6.1, 6.1, 7.0, 8.0, history=(a_step("activated", 6.0, begun=2.0),)),
        (
            "Its first token came 6.0 s late because it waited 4.0 s while a0 activated its model "
            "tiny."
        ),
    ),
    "relegated": (
        a_story(0.0, 9.0, 9.0, 10.0, 11.0, history=(a_step("relegated", 3.0, pulled=3.0),)),
        (
            "Its first token came 9.0 s late because a0 relegated it when its deadline could no "
            "longer be met, and it waited 6.0 s behind work that can be in time."
        ),
    ),
    "handed back": (
        a_story(0.0, 9.0, 9.0, 10.0, 11.0, history=(a_step("handed back", 3.0, pulled=2.0),)),
        (
            "Its first token came 9.0 s late because a0 handed it back without a run, and it waited"
            " 6.0 s for another pull."
        ),
    ),
    "instance died": (
        a_story(0.0, 9.0, 9.0, 10.0, 11.0, history=(a_step("lost", 9.0, pulled=2.0),)),
        (
            "Its first token came 9.0 s late because a0 died or lost its connection with it: 7.0 s "
            "passed until a1 pulled it."
        ),
    ),
    "engine died": (
        a_story(
            *(0.0, 9.0, 9.0, 2.0, 11.0),
            slo=WHOLE,
            history=(a_step("returned when the engine died", 3.0, pulled=1.0, begun=1.0),),
        ),
        (
            "Its answer was complete 1.0 s late because the engine of a0 died, and it waited 6.0 s "
            "to run again."
        ),
    ),
    "evicted for the head": (
        a_story(
            *(0.0, 9.0, 9.0, 2.0, 11.0),
            slo=WHOLE,
            history=(a_step("evicted", 3.0, pulled=1.0, begun=1.0, why=HEAD),),
        ),
        (
            "Its answer was complete 1.0 s late because a0 evicted it for a request with a nearer "
            "deadline, and it waited 6.0 s to run again."
        ),
    ),
    "swapped out, at the pace": (
        a_story(
            *(0.0, 1.0, 7.0, 2.0, 7.5),
            slo=PACED,
            late_tokens=5,
            max_tbt_s=4.6,
            history=(
                a_step("swapped out", 2.5, pulled=1.0, begun=1.0, why="an operator ordered it"),
                a_step("resumed", 7.0, pulled=1.0),
            ),
        ),
        (
            "5 of its 11 tokens came late because a0 swapped it out (an operator ordered it) for "
            "4.5 s."
        ),
    ),
    "slow engine": (
        a_story(0.0, 1.0, 1.0, 2.0, 12.0, slo=PACED, late_tokens=9, max_tbt_s=1.1),
        (
            "9 of its 11 tokens came late because the engine of a1 was slow by 9.0 s: its 11 tokens"
            " took 10.0 s (1.0 s each, 100 ms is the target)."
        ),
    ),
    "long answer": (
        a_story(0.0, 1.0, 1.0, 2.0, 22.0, slo=WHOLE, output_tokens=101),
        (
            "Its answer was complete 12.0 s late because the engine of a1 was slow by 10.0 s: its "
            "101 tokens took 20.0 s (200 ms each)."
        ),
    ),
    "engine, after it was passed on": (
        a_story(
            *(0.0, 0.1, 0.1, 4.0, 6.0),
            history=(a_step("passed on", 0.1, pulled=0.1, instance_id=A1, why="for a trial"),),
        ),
        (
            "Its first token came 3.0 s late because it waited 3.9 s in the engine of a1, behind "
            "the prefills of others; a1 passed it on without holding work back, for a trial."
        ),
    ),
    "end in the lane": (
        msgspec.structs.replace(
            a_story(0.5, 0.0, 0.0, 0.0, 4.0, outcome="deadline_expired", instance_id=None),
            pulled_at=0.0,
            submitted_at=0.0,
            first_token_at=0.0,
        ),
        (
            "It ended at its end without its whole answer because it waited 3.5 s in its lane, "
            "where work with nearer deadlines is served first."
        ),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_sentence_names_the_cause(name: str):
    story, sentence = EXAMPLES[name]

    assert sentence_of(story) == sentence


NOT_LATE = {
    "in time": (
        a_story(0.1, 0.2, 0.3, 0.4, 6.0, attained=True),
        "It was in time: its first token came 600 ms before its deadline.",
    ),
    "in time, with an answer without tokens": (
        a_story(0.1, 0.2, 0.3, 0.4, 0.8, attained=True, first_token_at=0.0, output_tokens=0),
        "It was in time: its first token came 200 ms before its deadline.",
    ),
    "in time, although it was evicted": (
        a_story(
            *(0.0, 4.0, 4.0, 2.0, 9.0),
            slo=WHOLE,
            attained=True,
            history=(a_step("evicted", 3.0, pulled=1.0, begun=1.0, why="reason"),),
        ),
        (
            "It was in time: its answer was complete 1.0 s before its deadline; a0 evicted it "
            "(reason), and it waited 1.0 s to run again."
        ),
    ),
    "in time, and passed on": (
        a_story(
            *(0.0, 0.1, 0.1, 0.4, 6.0),
            attained=True,
            history=(a_step("passed on", 0.1, pulled=0.1, instance_id=A1, why="for a trial"),),
        ),
        (
            "It was in time: its first token came 600 ms before its deadline; a1 passed it on "
            "without holding work back, for a trial."
        ),
    ),
    "best effort": (
        a_story(0.0, 4.0, 4.0, 5.0, 9.0, slo=Slo(), attained=True),
        "It has no deadline, and its answer was complete after 9.0 s.",
    ),
    "error": (
        a_story(0.0, 4.0, 4.0, 5.0, 9.0, outcome="cancelled"),
        "It ended with the error cancelled 9.0 s after it could begin.",
    ),
    "held": (
        a_story(-9.0, 0.0, 0.0, 0.0, -5.0, outcome="cancelled"),
        "It ended with the error cancelled 5.0 s before it could begin.",
    ),
    "refused": (
        Story(
            request_id=EXAMPLES["lane"][0].request_id,
            tenant=EXAMPLES["lane"][0].tenant,
            outcome="model_not_found",
            finished_at=NOW,
        ),
        "It ended with the error model_not_found, and was never in a lane.",
    ),
}


@pytest.mark.parametrize("name", NOT_LATE)
def test_a_request_that_was_not_late_has_no_cause(name: str):
    story, sentence = NOT_LATE[name]

    assert sentence_of(story) == sentence
    assert lost_time(story) == ()


def test_a_wait_before_a_run_within_its_target_is_the_cause_although_the_run_was_longer():
    """The run would have been in time without the wait."""
    story = a_story(0.0, 4.0, 4.0, 4.5, 13.0, slo=WHOLE)

    assert [(each.phase.value, each.lost_s) for each in lost_time(story)] == [
        ("lane", 4.0),
        ("engine", 0.5),
    ]


def test_of_equal_shares_the_more_specific_cause_is_named():
    story = a_story(0.0, 6.0, 6.0, 6.0, 7.0, history=(a_step("relegated", 3.0, pulled=3.0),))

    assert [(each.phase.value, each.lost_s) for each in lost_time(story)] == [
        ("relegated", 3.0),
        ("lane", 3.0),
    ]


def test_a_gap_between_tokens_counts_although_the_pace_was_kept_on_average():
    """Single late tokens are the fault of the engine, not of a short pause."""
    story = a_story(
        *(0.0, 0.0, 2.6, 2.0, 4.8),
        slo=Slo(ttft_s=3.0, tbt_s=0.5),
        late_tokens=1,
        max_tbt_s=1.6,
        history=(a_step("swapped out", 2.5, pulled=0.0, begun=0.0), a_step("resumed", 2.6)),
    )

    assert [each.phase.value for each in lost_time(story)] == ["decode", "swapped_out"]


def test_a_request_that_arrived_after_its_deadline_and_never_ran_lost_its_whole_wait():
    """A client sets an absolute deadline by its own clock."""
    never = {"pulled_at": 0.0, "submitted_at": 0.0, "first_token_at": 0.0, "instance_id": None}
    story = a_story(
        *(0.0, 0.0, 0.0, 0.0, 5.0),
        slo=Slo(deadline_at=NOW - 1.0),
        outcome="deadline_expired",
        **never,
    )

    (share,) = lost_time(story)
    assert (share.phase.value, share.lost_s) == ("lane", pytest.approx(5.0))


def test_a_record_without_times_is_late_for_unknown_reasons():
    story = Story(
        request_id=EXAMPLES["lane"][0].request_id,
        tenant=EXAMPLES["lane"][0].tenant,
        outcome="deadline_expired",
        finished_at=NOW,
    )

    assert sentence_of(story) == (
        "It ended at its end without its whole answer because of times that its record does not "
        "have."
    )


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.0124, "12 ms"), (3.14, "3.1 s"), (99.95, "100.0 s"), (250.4, "250 s")],
)
def test_durations_are_short(duration_s: float, text: str):
    assert seconds(duration_s) == text
