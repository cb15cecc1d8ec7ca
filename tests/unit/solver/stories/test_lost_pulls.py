"""Pulls that the record of a request does not explain were lost with their instances."""

from shared.contracts.requests import MAX_HISTORY
from solver.stories.lost_pulls import with_lost_pulls
from solver.stories.timeline import timeline
from tests.clocks import NOW
from tests.unit.solver.stories.lives import A0, A1, a_step, a_story

STORY = a_story(0.0, 5.0, 5.0, 6.0, 7.0)


def test_a_pull_before_the_last_one_was_lost():
    found = with_lost_pulls(STORY, [(A0, NOW + 2.0), (A1, NOW + 5.0)])

    assert found.history == (a_step("lost", 5.0, pulled=2.0),)


def test_the_pulls_of_the_record_were_not_lost():
    evicted = a_step("evicted", 3.0, pulled=1.0, begun=1.0)
    story = a_story(0.0, 5.0, 5.0, 6.0, 7.0, history=(evicted,))

    assert with_lost_pulls(story, [(A0, NOW + 1.0), (A1, NOW + 5.0)]) == story


def test_a_pull_is_lost_before_the_next_step():
    relegated = a_step("relegated", 4.0, pulled=4.0, instance_id=A1)
    story = a_story(0.0, 5.0, 5.0, 6.0, 7.0, history=(relegated,))
    found = with_lost_pulls(story, [(A0, NOW + 2.0)])

    assert found.history == (a_step("lost", 4.0, pulled=2.0), relegated)


def test_an_activation_after_a_death_is_part_of_what_the_death_costs():
    """All instances died, and the next one had to load the model again."""
    activated = a_step("activated", 4.9, begun=3.0, instance_id=A1)
    story = a_story(0.0, 5.0, 5.0, 6.0, 7.0, history=(activated,))
    found = with_lost_pulls(story, [(A0, NOW + 2.0)])

    assert found.history == (a_step("lost", 5.0, pulled=2.0), activated)
    assert [each.phase.value for each in timeline(found)][:2] == ["lane", "instance_died"]


def test_a_pull_after_the_last_one_of_the_record_is_of_another_copy():
    """Another instance got the request after a lost connection, and the first one completed it."""
    assert with_lost_pulls(STORY, [(A1, NOW + 5.0), (A0, NOW + 6.0)]) == STORY


def test_pulls_whose_steps_were_dropped_from_the_history_were_not_lost():
    steps = tuple(
        a_step("evicted", 1.0 + number, pulled=0.5 + number) for number in range(MAX_HISTORY)
    )
    story = a_story(0.0, 90.0, 90.0, 91.0, 92.0, history=steps)

    assert with_lost_pulls(story, [(A1, NOW + 1.2)]) == story
    assert len(with_lost_pulls(story, [(A1, NOW + 80.0)]).history) == MAX_HISTORY + 1
