"""Rows of responses: events, holders and takeovers, ends, retention."""

import asyncio

import msgspec
import pytest

from shared.contracts.errors import StaleLeaseError
from shared.store.objects.responses import (
    NEWS_OF,
    Appended,
    Ending,
    Progress,
    StoredEvent,
    StoredResponse,
)
from shared.store.objects.webhooks import Notice
from shared.store.store import Store
from tests.stores import ACME, OTHER, ManualClock, a_response, an_event

HELD_S = 10.0
FIRST = (an_event(0, "response.created"), an_event(1, "response.queued"))
NOTICE = Notice(
    tenant=ACME, type="response.completed", object_id="x", urls=("https://a/", "https://b/")
)


async def added(store: Store, **fields: object) -> StoredResponse:
    response, is_new = await store.responses.add(a_response(**fields), FIRST, held_s=HELD_S)
    assert is_new
    return response


def batch(response: StoredResponse, *numbers: int, **fields: object) -> Appended:
    values: dict[str, object] = {
        "response_id": response.id,
        "epoch": response.epoch,
        "events": tuple(an_event(number) for number in numbers),
        "status": "in_progress",
    }
    return Appended(**(values | fields))  # type: ignore[arg-type]  # names of fields


def ending(response: StoredResponse, events: list[StoredEvent]) -> Ending:
    return Ending(
        status="cancelled",
        object=b'{"events":%d}' % len(events),
        event=an_event(response.num_events, "response.cancelled"),
        notice=NOTICE,
    )


async def numbers_of(store: Store, response: StoredResponse) -> list[int]:
    return [event.number for event in await store.responses.events(response.id)]


async def test_a_response_is_found_by_its_tenant_with_its_events(store: Store, clock: ManualClock):
    response = await added(store)
    found = await store.responses.get(ACME, response.id)

    assert found == response
    assert (response.num_events, response.held_until) == (2, clock.now + HELD_S)
    assert await store.responses.get(OTHER, response.id) is None
    assert await store.responses.events(response.id) == list(FIRST)
    assert await store.responses.events(response.id, after=0, limit=5) == [FIRST[1]]
    assert await store.responses.events(response.id, limit=1) == [FIRST[0]]


async def test_an_id_is_used_once(store: Store):
    response = await added(store)
    again = a_response(id=response.id, asked=b"{}")

    assert await store.responses.add(again, FIRST, held_s=HELD_S) == (response, False)
    assert await numbers_of(store, response) == [0, 1]


async def test_events_of_several_responses_are_added_in_one_call(store: Store):
    first, second = await added(store), await added(store)

    results = await store.responses.append(
        [batch(second, 2, 3, object=b'{"status":"in_progress"}'), batch(first, 2)]
    )

    assert results == [True, True]
    assert await numbers_of(store, first) == [0, 1, 2]
    assert await numbers_of(store, second) == [0, 1, 2, 3]
    found = await store.responses.get(ACME, second.id)
    assert found is not None
    assert (found.status, found.object) == ("in_progress", b'{"status":"in_progress"}')
    assert await store.responses.progress([first.id, second.id, "x"]) == {
        first.id: Progress(num_events=3, is_running=True),
        second.id: Progress(num_events=4, is_running=True),
    }


async def test_a_repeated_batch_is_stored_once(store: Store):
    """The answer to its commit may have been lost."""
    response = await added(store)
    await store.responses.append([batch(response, 2, 3)])

    assert await store.responses.append([batch(response, 2, 3)]) == [True]
    assert await store.responses.append([batch(response, 5)]) == [False]
    assert await numbers_of(store, response) == [0, 1, 2, 3]


async def test_the_last_batch_ends_a_response_and_enqueues_deliveries(
    store: Store, clock: ManualClock
):
    response = await added(store)
    clock.now += 3.0
    last = batch(response, 2, status="completed", object=b"{}", notice=NOTICE)

    assert await store.responses.append([last]) == [True]
    assert await store.responses.append([last]) == [True]
    assert await store.responses.append([batch(response, 3)]) == [False]
    found = await store.responses.get(ACME, response.id)
    assert found is not None
    assert (found.status, found.ended_at, found.held_until) == ("completed", clock.now, None)
    due = await store.deliveries.due(limit=10, limit_per_url=10)
    assert [each.url for each in due] == ["https://a/", "https://b/"]
    assert len({each.event_id for each in due}) == 1


async def test_a_held_response_is_not_taken_over(store: Store, clock: ManualClock):
    response = await added(store)
    clock.now += HELD_S - 1.0
    held = await store.responses.hold("a", [response.id, "x"], held_s=HELD_S)
    clock.now += HELD_S - 1.0

    assert held == {response.id}
    assert await store.responses.take_over("b", held_s=HELD_S, limit=10) == []


async def test_a_left_response_is_taken_over_once_and_its_former_runner_writes_no_more(
    store: Store, clock: ManualClock
):
    response = await added(store)
    clock.now += HELD_S
    taken = await store.responses.take_over("b", held_s=HELD_S, limit=10)
    again = await store.responses.take_over("c", held_s=HELD_S, limit=10)

    assert [(each.id, each.runner, each.epoch) for each in taken] == [(response.id, "b", 2)]
    assert again == []
    assert await store.responses.append([batch(response, 2)]) == [False]
    assert await store.responses.hold("a", [response.id], held_s=HELD_S) == set()
    assert await store.responses.append([batch(taken[0], 2)]) == [True]


async def test_takeovers_at_once_do_not_share_responses(store: Store, clock: ManualClock):
    responses = {(await added(store)).id for _ in range(12)}
    clock.now += HELD_S

    taken = await asyncio.gather(
        *(store.responses.take_over(name, held_s=HELD_S, limit=20) for name in "bcd")
    )
    ids = [each.id for some in taken for each in some]

    assert sorted(ids) == sorted(responses)


async def test_responses_that_are_let_go_can_be_taken_at_once(store: Store):
    response = await added(store)
    await store.responses.let_go("a")
    taken = await store.responses.take_over("b", held_s=HELD_S, limit=10)

    assert [each.id for each in taken] == [response.id]


async def test_an_ended_response_is_neither_held_nor_taken_over(store: Store, clock: ManualClock):
    response = await added(store)
    await store.responses.append([batch(response, 2, status="completed", object=b"{}")])
    clock.now += 10 * HELD_S

    assert await store.responses.take_over("b", held_s=HELD_S, limit=10) == []
    assert await store.responses.hold("a", [response.id], held_s=HELD_S) == set()


async def test_any_gateway_ends_a_response_and_its_runner_writes_no_more(store: Store):
    response = await added(store)
    await store.responses.append([batch(response, 2)])

    ended = await store.responses.end(response.id, ending)
    again = await store.responses.end(response.id, ending)

    assert ended is not None
    assert (ended.status, ended.object, ended.num_events) == ("cancelled", b'{"events":3}', 4)
    assert again == ended
    # One event more, as the end has: it must not look like a repeat.
    assert await store.responses.append([batch(response, 3)]) == [False]
    events = await store.responses.events(response.id)
    assert [event.type for event in events][-1] == "response.cancelled"
    assert len(await store.deliveries.due(limit=10, limit_per_url=10)) == 2
    assert await store.responses.end("x", ending) is None


async def test_a_former_runner_cannot_end_a_response(store: Store, clock: ManualClock):
    response = await added(store)
    clock.now += HELD_S
    (taken,) = await store.responses.take_over("b", held_s=HELD_S, limit=10)

    refused = await store.responses.end(response.id, ending, epoch=response.epoch)
    ended = await store.responses.end(response.id, ending, epoch=taken.epoch)

    assert refused == taken
    assert ended is not None
    assert ended.status == "cancelled"


async def test_news_of_many_responses_begin_at_the_position_of_each(store: Store):
    responses = [await added(store) for _ in range(NEWS_OF + 3)]
    await store.responses.append([batch(responses[0], 2, 3)])
    positions = {response.id: 0 for response in responses} | {responses[0].id: 2}

    news = await store.responses.news(positions)

    assert {name: [event.number for event in events] for name, events in news.items()} == {
        response.id: [3] if response is responses[0] else [1] for response in responses
    }


async def test_a_chain_has_the_turns_in_order_and_ends_where_one_is_missing(store: Store):
    first = await added(store)
    second = await added(store, previous_response_id=first.id)
    third = await added(store, previous_response_id=second.id)

    whole = await store.responses.chain(ACME, third.id)
    foreign = await store.responses.chain(OTHER, third.id)
    await store.responses.remove(ACME, first.id)
    broken = await store.responses.chain(ACME, third.id)

    assert [each.id for each in whole] == [first.id, second.id, third.id]
    assert foreign == []
    assert [each.id for each in broken] == [second.id, third.id]


async def test_a_removed_response_is_gone_with_its_events(store: Store):
    response = await added(store)

    assert await store.responses.remove(OTHER, response.id) is None
    assert await store.responses.remove(ACME, response.id) == response
    assert await store.responses.remove(ACME, response.id) is None
    assert await store.responses.events(response.id) == []
    assert await store.responses.append([batch(response, 2)]) == [False]


async def test_expired_responses_are_invisible_and_removed_by_the_holder_of_the_job(
    store: Store, clock: ManualClock
):
    kept = await added(store)
    expiring = await added(store, expires_at=clock.now + 50.0)
    clock.now += 50.0
    lease = await store.leases.acquire("job", "a", duration_s=10.0)
    assert lease is not None
    invisible = await store.responses.get(ACME, expiring.id)
    removed = await store.responses.remove_expired(lease, limit=10)
    again = await store.responses.remove_expired(lease, limit=10)

    assert invisible is None
    assert (removed, again) == (1, 0)
    assert await store.responses.events(expiring.id) == []
    assert await store.responses.get(ACME, kept.id) is not None
    stale = msgspec.structs.replace(lease, token=lease.token + 1)
    with pytest.raises(StaleLeaseError):
        await store.responses.remove_expired(stale, limit=10)
