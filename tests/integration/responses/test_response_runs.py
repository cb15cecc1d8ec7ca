"""Runs of stored responses: from the call to the front to the last stored event."""

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from services.gateway.responses.runner import HELD_S
from shared.contracts.errors import CapacityError, ContractError, StoreUnavailableError
from shared.store.objects.responses import Appended, StoredEvent, StoredResponse
from shared.store.settings import StoreSettings
from tests.brokers import eventually
from tests.integration.responses.scripted_front import (
    ITEMS,
    Parts,
    ScriptedFront,
    gateway_parts,
)
from tests.renderings.responses import Event, message
from tests.stores import ACME, OTHER, ManualClock

ONLY_SQLITE = pytest.mark.parametrize("url", ["sqlite"], indirect=True)
"""For tests of what the database has no part in."""
TEXT = ITEMS[1]["content"][0]["text"]


def decoded(events: list[StoredEvent]) -> list[Event]:
    return [msgspec.json.decode(event.data) for event in events]


def text_in(events: list[StoredEvent]) -> str:
    kind = "response.output_text.delta"
    return "".join(event["delta"] for event in decoded(events) if event["type"] == kind)


async def response_of(parts: Parts, response_id: str) -> StoredResponse:
    return await parts.responses.get(ACME, response_id)


async def object_of(parts: Parts, response_id: str) -> Event:
    made: Event = msgspec.json.decode((await response_of(parts, response_id)).object)
    return made


async def test_events_are_stored_in_order_and_the_object_is_that_of_the_last(
    settings: StoreSettings,
):
    async with gateway_parts(settings, ScriptedFront()) as parts:
        created = await parts.create()
        events = await parts.followed(created.response.id)
        stored = await response_of(parts, created.response.id)
        due = await parts.store.deliveries.due(limit=10, limit_per_url=10)

    assert created.refusal is None
    assert [event.number for event in events] == list(range(len(events)))
    assert [event["sequence_number"] for event in decoded(events)] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert events[-1].type == "response.completed"
    assert text_in(events) == TEXT
    last = decoded(events)[-1]["response"]
    assert msgspec.json.decode(stored.object) == last
    assert (stored.status, last["id"], last["background"]) == ("completed", stored.id, True)
    assert stored.ended_at is not None
    assert [msgspec.json.decode(each.payload)["data"] for each in due] == [{"id": stored.id}]
    assert [each.type for each in due] == ["response.completed"]


@ONLY_SQLITE
async def test_the_front_gets_the_tenant_the_key_and_a_stream(settings: StoreSettings):
    async with gateway_parts(settings, ScriptedFront()) as parts:
        created = await parts.create(OTHER, temperature=0.5)
        await parts.followed(created.response.id)

    (asked,) = parts.front.asked
    assert asked.tenant == OTHER
    assert asked.headers["idempotency-key"] == created.response.id
    assert asked.body == {"model": "m", "input": "6*7?", "temperature": 0.5, "stream": True}


@pytest.mark.parametrize("stop_after", [1, 2, 4, 9, 13, 20, 30])
async def test_another_gateway_continues_where_a_killed_one_stopped(
    settings: StoreSettings, clock: ManualClock, stop_after: int
):
    """Every event is there once and in order, though another rendering cuts texts differently."""
    first_front = ScriptedFront(stop_after=stop_after)
    async with (
        gateway_parts(settings, first_front, clock=clock) as first,
        gateway_parts(settings, ScriptedFront(piece_chars=8), clock=clock) as second,
    ):
        created = await first.create()
        response_id = created.response.id
        await eventually(lambda: bool(first_front.asked))
        # The front's first event was sent when the response was created.
        num_sent = 2 + max(0, stop_after - 1)
        rows = first.store.responses

        async def all_stored() -> bool:
            return len(await rows.events(response_id)) == num_sent

        await eventually(all_stored)
        before = await rows.events(response_id)
        await first.kill()
        clock.now += HELD_S + 1.0
        events = await second.followed(
            response_id, after=before[3].number if stop_after > 3 else -1
        )
        whole = await rows.events(response_id)
        stored = await response_of(second, response_id)

    assert [event.number for event in whole] == list(range(len(whole)))
    assert whole[: len(before)] == before
    assert whole[-len(events) :] == events
    assert text_in(whole) == TEXT
    assert [event.type for event in whole].count("response.completed") == 1
    items = [event for event in decoded(whole) if event["type"] == "response.output_item.done"]
    assert [item["item"]["id"] for item in items] == [
        item["id"] for item in msgspec.json.decode(stored.object)["output"]
    ]
    assert (stored.status, stored.epoch) == ("completed", 2)


async def test_a_gateway_that_comes_back_writes_no_more(
    settings: StoreSettings, clock: ManualClock
):
    """It was stopped for longer than its responses are held, and knows nothing of it."""
    slow = ScriptedFront(stop_after=8)
    async with (
        gateway_parts(settings, slow, clock=clock) as first,
        gateway_parts(settings, ScriptedFront(), clock=clock) as second,
    ):
        created = await first.create()
        rows = first.store.responses

        async def all_stored() -> bool:
            return len(await rows.events(created.response.id)) == 9

        await eventually(all_stored)
        first.freeze()
        clock.now += HELD_S + 1.0
        await second.followed(created.response.id)
        whole = await rows.events(created.response.id)
        slow.resume.set()
        await eventually(lambda: not first.runner._running)
        after = await rows.events(created.response.id)

    assert text_in(whole) == TEXT
    assert after == whole


async def test_a_gateway_that_stops_in_order_leaves_its_responses_at_once(
    settings: StoreSettings, clock: ManualClock
):
    async with gateway_parts(settings, ScriptedFront(), clock=clock) as second:
        async with gateway_parts(settings, ScriptedFront(stop_after=6), clock=clock) as first:
            created = await first.create()
        events = await second.followed(created.response.id)

    assert text_in(events) == TEXT


async def test_a_response_is_cancelled_from_another_gateway(settings: StoreSettings):
    front = ScriptedFront(stop_after=18)
    async with (
        gateway_parts(settings, front) as first,
        gateway_parts(settings, ScriptedFront()) as second,
    ):
        created = await first.create()
        response_id = created.response.id
        following = asyncio.create_task(first.followed(response_id))

        async def has_text() -> bool:
            return bool(text_in(await first.store.responses.events(response_id)))

        await eventually(has_text)
        cancelled = await second.responses.cancel(ACME, response_id)
        again = await second.responses.cancel(ACME, response_id)
        front.resume.set()
        events = await following
        await eventually(lambda: not first.runner._running)
        due = await first.store.deliveries.due(limit=10, limit_per_url=10)
        stored = await response_of(first, response_id)

    made = msgspec.json.decode(cancelled.object)
    assert (cancelled.status, made["status"], again) == ("cancelled", "cancelled", cancelled)
    assert stored == cancelled
    assert events[-1].type == "response.cancelled"
    assert made["output"][1]["content"][0]["text"] == text_in(events)
    assert second.cancelled == [response_id]
    assert [each.type for each in due] == ["response.cancelled"]


@ONLY_SQLITE
async def test_only_background_responses_are_cancelled(settings: StoreSettings):
    async with gateway_parts(settings, ScriptedFront()) as parts:
        created = await parts.create(background=False, store=True)
        with pytest.raises(ContractError, match="background=true"):
            await parts.responses.cancel(ACME, created.response.id)


@ONLY_SQLITE
async def test_a_refused_request_leaves_no_response(settings: StoreSettings):
    error = {"error": {"message": "no", "type": "invalid_request_error", "code": "bad"}}
    async with gateway_parts(settings, ScriptedFront(refusals=[(400, error)])) as parts:
        created = await parts.create()
        with pytest.raises(ContractError) as gone:
            await parts.responses.get(ACME, created.response.id)

    assert created.refusal is not None
    assert (created.refusal.status, msgspec.json.decode(created.refusal.body)) == (400, error)
    assert gone.value.code == "response_not_found"


def retryable(code: str = "over_capacity", kind: str = "rate_limit_error") -> Event:
    return {"error": {"message": "later", "type": kind, "code": code, "param": None}}


@ONLY_SQLITE
async def test_the_mesh_is_asked_again_after_a_failure_that_may_pass(settings: StoreSettings):
    front = ScriptedFront(error_after=7, error=retryable())
    async with gateway_parts(settings, front) as parts:
        created = await parts.create()
        events = await parts.followed(created.response.id)

    assert len(front.asked) == 2
    assert [event.number for event in events] == list(range(len(events)))
    assert text_in(events) == TEXT


@ONLY_SQLITE
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (retryable("deadline_expired", "timeout_error"), "response.failed"),
        (retryable("cancelled", "cancelled"), "response.cancelled"),
    ],
)
async def test_a_final_failure_ends_the_response_with_what_there_is(
    settings: StoreSettings, error: Event, kind: str
):
    front = ScriptedFront(error_after=14, error=error)
    async with gateway_parts(settings, front) as parts:
        created = await parts.create()
        events = await parts.followed(created.response.id)
        made = await object_of(parts, created.response.id)
        due = await parts.store.deliveries.due(limit=10, limit_per_url=10)

    assert events[-1].type == kind
    assert decoded(events)[-1]["response"] == made
    assert made["output"][0]["content"][0]["text"] == "let me see ..."
    assert [each.type for each in due] == [kind]


@ONLY_SQLITE
async def test_an_answer_that_contradicts_what_was_sent_fails(
    settings: StoreSettings, clock: ManualClock
):
    other = ScriptedFront(items=[message("something else")])
    async with (
        gateway_parts(settings, ScriptedFront(stop_after=9), clock=clock) as first,
        gateway_parts(settings, other, clock=clock) as second,
    ):
        created = await first.create()

        async def all_stored() -> bool:
            return len(await first.store.responses.events(created.response.id)) == 10

        await eventually(all_stored)
        await first.kill()
        clock.now += HELD_S + 1.0
        events = await second.followed(created.response.id)
        made = await object_of(second, created.response.id)

    assert events[-1].type == "response.failed"
    assert made["error"]["code"] == "run_diverged"


@ONLY_SQLITE
async def test_events_wait_while_the_store_is_away(
    settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
):
    async with gateway_parts(settings, ScriptedFront()) as parts:
        rows = parts.store.responses
        failures = [StoreUnavailableError("away"), StoreUnavailableError("still away")]
        write = rows._append

        async def failing(connection: Any, batches: list[Appended]) -> None:
            await write(connection, batches)
            if failures:
                raise failures.pop()

        monkeypatch.setattr(rows, "_append", failing)
        created = await parts.create()
        events = await parts.followed(created.response.id)

    assert failures == []
    assert [event.number for event in events] == list(range(len(events)))
    assert text_in(events) == TEXT


async def test_a_client_that_waits_gets_no_answer_of_a_killed_gateway(
    settings: StoreSettings, clock: ManualClock
):
    """Its connection is gone, and no other client knows the response."""
    async with (
        gateway_parts(settings, ScriptedFront(stop_after=5), clock=clock) as first,
        gateway_parts(settings, ScriptedFront(), clock=clock) as second,
    ):
        created = await first.create(background=False, store=True)
        await first.kill()
        clock.now += HELD_S + 1.0
        events = await second.followed(created.response.id)
        due = await second.store.deliveries.due(limit=10, limit_per_url=10)

    assert events[-1].type == "response.failed"
    assert second.front.asked == []
    assert due == []


@ONLY_SQLITE
async def test_a_deleted_response_is_stopped_and_its_readers_end(settings: StoreSettings):
    async with gateway_parts(settings, ScriptedFront(stop_after=9)) as parts:
        created = await parts.create()
        following = asyncio.create_task(parts.followed(created.response.id))
        with pytest.raises(ContractError):
            await parts.responses.delete(OTHER, created.response.id)
        await parts.responses.delete(ACME, created.response.id)
        async with asyncio.timeout(30):
            await following
        await eventually(lambda: not parts.runner._running)

    assert parts.cancelled == [created.response.id]


@ONLY_SQLITE
async def test_a_conversation_continues_with_its_turns_as_input(settings: StoreSettings):
    async with gateway_parts(settings, ScriptedFront(items=[message("42")])) as parts:
        first = await parts.create()
        await parts.followed(first.response.id)
        second = await parts.create(input="why?", previous_response_id=first.response.id)
        await parts.followed(second.response.id)
        made = await object_of(parts, second.response.id)
        with pytest.raises(ContractError) as foreign:
            await parts.create(OTHER, previous_response_id=first.response.id)

    contents = [item["content"] for item in parts.front.asked[1].body["input"]]
    assert contents[0] == "6*7?"
    assert contents[1][0]["text"] == "42"
    assert contents[2] == "why?"
    assert made["previous_response_id"] == first.response.id
    assert foreign.value.code == "previous_response_not_found"


@ONLY_SQLITE
async def test_a_tenant_has_a_limit_of_running_responses(settings: StoreSettings):
    front = ScriptedFront(stop_after=5)
    async with gateway_parts(settings, front, max_running=2) as parts:
        created = [await parts.create() for _ in range(2)]
        with pytest.raises(CapacityError):
            await parts.create()
        await parts.create(OTHER)
        front.resume.set()
        for each in created:
            await parts.followed(each.response.id)
        await eventually(lambda: not parts.runner._running)
        await parts.create()


@ONLY_SQLITE
async def test_concurrent_creations_do_not_pass_the_limit(settings: StoreSettings):
    front = ScriptedFront(stop_after=5)
    async with gateway_parts(settings, front, max_running=2) as parts:
        found = await asyncio.gather(*(parts.create() for _ in range(5)), return_exceptions=True)
        front.resume.set()
        await eventually(lambda: not parts.runner._running)
        await parts.create()

    assert [type(each) for each in found].count(CapacityError) == 3


@ONLY_SQLITE
async def test_a_repeated_key_gets_the_same_response(settings: StoreSettings):
    body = msgspec.json.encode({"model": "m", "input": "x", "background": True})
    other = msgspec.json.encode({"model": "m", "input": "y", "background": True})
    key = {"idempotency-key": "k1"}
    async with gateway_parts(settings, ScriptedFront()) as parts:
        first = await parts.responses.create(ACME, body, key)
        again = await parts.responses.create(ACME, body, key)
        foreign = await parts.responses.create(OTHER, body, key)
        with pytest.raises(ContractError) as conflict:
            await parts.responses.create(ACME, other, key)
        await parts.followed(first.response.id)
        ended = await parts.responses.create(ACME, body, key)

    assert first.response.id == again.response.id == ended.response.id
    assert foreign.response.id != first.response.id
    assert ended.response.status == "completed"
    assert (conflict.value.status, conflict.value.code) == (409, "id_conflict")
    assert len(parts.front.asked) == 2


@ONLY_SQLITE
async def test_an_unknown_model_is_refused(settings: StoreSettings):
    async with gateway_parts(settings, ScriptedFront()) as parts:
        with pytest.raises(ContractError) as refused:
            await parts.create(model="x")

    assert refused.value.code == "model_not_found"


async def test_many_streams_are_cut_and_resumed_elsewhere_while_a_gateway_is_killed(
    settings: StoreSettings, clock: ManualClock
):
    """Every client gets every event once and in order, though none reads from one place."""
    number, cuts = 24, 5
    front = ScriptedFront(stop_after=15)
    async with (
        gateway_parts(settings, front, clock=clock) as first,
        gateway_parts(settings, ScriptedFront(), clock=clock) as second,
        gateway_parts(settings, ScriptedFront(), clock=clock) as third,
    ):
        created = await asyncio.gather(*(first.create() for _ in range(number)))
        ids = [each.response.id for each in created]

        async def client(place: int, response_id: str) -> list[StoredEvent]:
            got: list[StoredEvent] = []
            cut = 0
            while not got or got[-1].type != "response.completed":
                parts = (first, second, third)[(place + cut) % 3]
                most = 3 if cut < cuts else 10_000
                position = got[-1].number if got else -1
                async with aclosing(parts.read(response_id, after=position)) as batches:
                    async for events in batches:
                        got += events[:most]
                        most -= len(events)
                        if most <= 0:
                            break
                cut += 1
            return got

        clients = [asyncio.create_task(client(*each)) for each in enumerate(ids)]

        async def are_all_stopped() -> bool:
            counts = await first.store.responses.progress(ids)
            return all(each.num_events == 16 for each in counts.values())

        await eventually(are_all_stopped)
        await first.kill()
        clock.now += HELD_S + 1.0
        async with asyncio.timeout(60):
            received = await asyncio.gather(*clients)

    for events in received:
        assert [event.number for event in events] == list(range(len(events)))
        assert text_in(events) == TEXT
        assert events[-1].type == "response.completed"


@ONLY_SQLITE
async def test_a_bug_in_a_loop_of_the_runner_ends_its_context(
    settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
):
    async def broken(*_args: object, **_fields: object) -> None:
        raise ZeroDivisionError

    async def run() -> None:
        async with asyncio.timeout(30), gateway_parts(settings, ScriptedFront()) as parts:
            monkeypatch.setattr(type(parts.store.responses), "take_over", broken)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await run()

    assert caught.value.subgroup(ZeroDivisionError) is not None
