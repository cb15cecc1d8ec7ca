"""The life of a request is divided into phases, without gaps."""

import msgspec

from shared.contracts.stories.story import Story
from solver.stories.timeline import timeline
from tests.clocks import NOW
from tests.unit.solver.stories.lives import A0, A1, a_step, a_story


def phases(story: Story) -> list[tuple[str, float, float]]:
    """Name, begin and end of each phase, in seconds after the arrival."""
    return [
        (each.phase.value, round(each.begun_at - NOW, 3), round(each.ended_at - NOW, 3))
        for each in timeline(story)
    ]


def test_an_undisturbed_request_waits_runs_and_ends():
    story = a_story(0.1, 2.0, 2.5, 4.0, 9.0, prefill_s=0.5)

    assert phases(story) == [
        ("intake", 0.0, 0.1),
        ("lane", 0.1, 2.0),
        ("window", 2.0, 2.5),
        ("engine", 2.5, 3.5),
        ("prefill", 3.5, 4.0),
        ("decode", 4.0, 9.0),
    ]
    assert [each.instance_id for each in timeline(story)] == [None, None, A1, A1, A1, A1]


def test_an_evicted_request_decodes_waits_and_decodes_again():
    evicted = a_step("evicted", 4.0, pulled=1.0, begun=1.0, why="reason")
    story = a_story(0.0, 7.0, 7.5, 2.0, 9.0, history=(evicted,))

    assert phases(story) == [
        ("lane", 0.0, 1.0),
        ("engine", 1.0, 2.0),
        ("decode", 2.0, 4.0),
        ("evicted", 4.0, 7.0),
        ("window", 7.0, 7.5),
        ("decode", 7.5, 9.0),
    ]
    waited = timeline(story)[3]
    assert (waited.instance_id, waited.why) == (A0, "reason")


def test_a_swapped_out_request_waits_on_its_instance():
    """Its pull precedes the step, so the time until it resumes is not a wait in a queue."""
    history = (
        a_step("swapped out", 3.0, pulled=1.0, begun=1.0, instance_id=A1),
        a_step("resumed", 6.0, pulled=1.0, instance_id=A1),
    )
    story = a_story(0.0, 1.0, 6.0, 2.0, 8.0, history=history)

    assert phases(story)[2:] == [
        ("decode", 2.0, 3.0),
        ("swapped_out", 3.0, 6.0),
        ("decode", 6.0, 8.0),
    ]


def test_a_relegated_request_waits_again():
    story = a_story(0.0, 9.0, 9.0, 10.0, 11.0, history=(a_step("relegated", 3.0, pulled=3.0),))

    assert phases(story) == [
        ("lane", 0.0, 3.0),
        ("relegated", 3.0, 9.0),
        ("engine", 9.0, 10.0),
        ("decode", 10.0, 11.0),
    ]


def test_an_activation_divides_the_wait():
    story = a_story(0.0, 6.1, 6.1, 7.0, 8.0, history=(a_step("activated", 6.0, begun=4.0),))

    assert phases(story)[:3] == [("lane", 0.0, 4.0), ("model_swap", 4.0, 6.0), ("lane", 6.0, 6.1)]


def test_a_request_that_was_handed_back_waited_in_the_window_first():
    story = a_story(0.0, 5.0, 5.0, 6.0, 7.0, history=(a_step("handed back", 3.0, pulled=1.0),))

    assert phases(story)[:3] == [
        ("lane", 0.0, 1.0),
        ("window", 1.0, 3.0),
        ("handed_back", 3.0, 5.0),
    ]


def test_a_request_that_was_passed_on_waited_in_the_window_until_then():
    passed = a_step("passed on", 3.0, pulled=1.0, instance_id=A1, why="for a trial")
    story = a_story(0.0, 1.0, 3.0, 6.0, 7.0, history=(passed,))

    assert phases(story) == [
        ("lane", 0.0, 1.0),
        ("window", 1.0, 3.0),
        ("engine", 3.0, 6.0),
        ("decode", 6.0, 7.0),
    ]


def test_a_lost_pull_takes_the_time_until_the_next_pull():
    story = a_story(0.0, 5.0, 5.0, 6.0, 7.0, history=(a_step("lost", 5.0, pulled=2.0),))

    assert phases(story)[:2] == [("lane", 0.0, 2.0), ("instance_died", 2.0, 5.0)]


def test_a_step_of_an_older_agent_has_no_pull():
    """Its time counts as the wait before it."""
    story = a_story(0.0, 5.0, 5.0, 1.0, 7.0, history=(a_step("evicted", 3.0),))

    assert phases(story)[:2] == [("lane", 0.0, 3.0), ("evicted", 3.0, 5.0)]


def test_a_step_of_a_newer_agent_changes_nothing_about_the_wait():
    story = a_story(0.0, 5.0, 5.0, 6.0, 7.0, history=(a_step("upgraded", 3.0, pulled=3.0),))

    assert phases(story)[0] == ("lane", 0.0, 3.0)
    assert phases(story)[1] == ("lane", 3.0, 5.0)


def test_clocks_of_several_machines_may_differ():
    """A time before that of an earlier stage counts as the earlier stage's."""
    story = a_story(2.0, 1.5, 1.8, 3.0, 4.0)

    assert phases(story) == [("intake", 0.0, 2.0), ("engine", 2.0, 3.0), ("decode", 3.0, 4.0)]


def test_a_request_that_no_instance_pulled_waits_to_its_end():
    story = msgspec.structs.replace(
        a_story(1.0, 0.0, 0.0, 0.0, 4.0),
        pulled_at=0.0,
        submitted_at=0.0,
        first_token_at=0.0,
        instance_id=None,
    )

    assert phases(story) == [("intake", 0.0, 1.0), ("lane", 1.0, 4.0)]
