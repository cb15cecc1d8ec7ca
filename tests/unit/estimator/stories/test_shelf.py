"""Records of requests are bounded by age, number and size, and each request has one."""

from collections.abc import Iterable

import msgspec
import pytest

from services.estimator.stories.shelf import Shelf, ShelfSettings
from shared.contracts.base import InstanceId, RequestId, TenantId, encode
from shared.contracts.stories.questions import StoriesReported, StoriesRequested
from shared.contracts.stories.story import PulledRequest, RequeuedRequest, Story
from tests.clocks import NOW
from tests.unit.solver.stories.lives import A0, A1, a_step, a_story

ACME = TenantId("acme")
END = NOW + 7.0
"""Time at which the requests of `ended` end."""


def ended(request_id: str, **fields: object) -> Story:
    story = a_story(0.0, 5.0, 5.0, 6.0, 7.0)
    return msgspec.structs.replace(story, request_id=RequestId(request_id), **fields)


def shelf_with(*stories: Story, **bounds: float) -> Shelf:
    shelf = Shelf(msgspec.convert(bounds, ShelfSettings), heard_since=NOW)
    for story in stories:
        shelf.ended(story, END)
    return shelf


def ids(found: StoriesReported) -> list[str]:
    return [each.request_id for each in found.stories]


def ask(shelf: Shelf, *, now: float = END, **fields: object) -> StoriesReported:
    return shelf.answer(msgspec.structs.replace(StoriesRequested(reply_to=""), **fields), now)


def test_answers_are_newest_first_and_limited():
    shelf = shelf_with(*map(ended, "abc"))

    assert ids(ask(shelf)) == ["c", "b", "a"]
    assert ids(ask(shelf, limit=2)) == ["c", "b"]


def test_a_tenant_sees_its_own_requests():
    shelf = shelf_with(ended("a"), ended("a", tenant=TenantId("other")), ended("b"))

    assert ids(ask(shelf, tenant=ACME)) == ["b", "a"]
    assert len(ask(shelf, request_id=RequestId("a")).stories) == 2
    (own,) = ask(shelf, tenant=ACME, request_id=RequestId("a")).stories
    assert own.tenant == ACME


def test_late_requests_and_those_since_a_time_are_found():
    shelf = shelf_with(
        ended("late"), ended("in time", attained=True), ended("old", finished_at=NOW)
    )

    assert ids(ask(shelf, only_late=True)) == ["old", "late"]
    assert ids(ask(shelf, since=END)) == ["in time", "late"]


def test_the_number_of_records_is_bounded():
    """The answer says since when all records are kept."""
    shelf = shelf_with(ended("a", finished_at=NOW + 1.0), ended("b"), ended("c"), max_records=2)

    assert ids(ask(shelf)) == ["c", "b"]
    assert ask(shelf).heard_since == NOW + 1.0


def test_the_size_of_records_is_bounded():
    size = len(encode(ended("a")))
    shelf = shelf_with(*map(ended, "abcdefgh"), max_bytes=max(1024, 3 * size))

    assert len(shelf) == shelf.num_bytes // size == max(1024, 3 * size) // size
    assert ids(ask(shelf))[0] == "h"


def test_old_records_are_dropped():
    shelf = shelf_with(ended("a"), kept_s=60.0)

    assert ids(ask(shelf, now=END + 59.0)) == ["a"]
    assert ids(ask(shelf, now=END + 61.0)) == []
    assert shelf.num_bytes == 0
    assert ask(shelf, now=END + 61.0).heard_since == END + 1.0


@pytest.mark.parametrize(
    ("stories", "kept"),
    [
        ((ended("r"), ended("r", instance_id=A0)), A1),
        ((ended("r", outcome="deadline_expired"), ended("r", instance_id=A0)), A0),
        ((ended("r"), ended("r", instance_id=A0, outcome="deadline_expired")), A1),
        ((ended("r"), ended("r", instance_id=A0, arrived_at=NOW + 1.0)), A0),
    ],
    ids=["two answers", "an error first", "an error later", "another request"],
)
def test_the_first_answer_of_a_request_is_kept(stories: Iterable[Story], kept: InstanceId):
    (story,) = ask(shelf_with(*stories)).stories

    assert story.instance_id == kept


def test_a_pull_of_an_instance_that_reported_nothing_else_was_lost():
    shelf = shelf_with()
    for instance_id, after in ((A0, 2.0), (A1, 5.0)):
        request = PulledRequest(tenant=ACME, request_id=RequestId("r"), at=NOW + after)
        shelf.pulled(request, instance_id)
    (held,) = ask(shelf, request_id=RequestId("r")).held
    shelf.ended(ended("r"), END)
    found = ask(shelf, request_id=RequestId("r"))

    assert (held.instance_id, held.at) == (A1, NOW + 5.0)
    assert [(each.what, each.instance_id) for each in found.stories[0].history] == [("lost", A0)]
    assert found.held == ()


def test_a_record_of_a_grouper_gets_the_steps_that_instances_reported():
    """A grouper knows only that the request did not end; its pull was not lost."""
    shelf = shelf_with()
    name = RequestId("r")
    evicted = a_step("evicted", 4.0, pulled=2.0, begun=2.0)
    shelf.pulled(PulledRequest(tenant=ACME, request_id=name, at=NOW + 2.0), A0)
    shelf.requeued(RequeuedRequest(tenant=ACME, request_id=name, step=evicted))
    shelf.ended(ended("r", pulled_at=0.0, instance_id=None, outcome="deadline_expired"), END)
    (story,) = ask(shelf).stories

    assert story.history == (evicted,)


def test_pulls_of_requests_without_an_end_are_bounded():
    shelf = shelf_with(max_records=2)
    for name in "abc":
        shelf.pulled(PulledRequest(tenant=ACME, request_id=RequestId(name), at=NOW), A0)

    assert ask(shelf, request_id=RequestId("a")).held == ()
    assert len(ask(shelf, request_id=RequestId("b")).held) == 1
