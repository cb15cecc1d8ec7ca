"""Rows of requests whose ids mean something: claims, repeats, finals and their ends."""

import asyncio

import msgspec

from shared.contracts.base import InstanceId, RequestId, TenantId
from shared.store.requests.records import (
    Asked,
    Claim,
    ClaimAsked,
    ClaimOutcome,
    Ended,
    Grouped,
    Started,
)
from shared.store.requests.rows import CLAIM_S
from shared.store.store import Store
from tests.stores import ACME, NOW, OTHER, ManualClock

ID = RequestId("order-1")
KEPT_S = 100.0


def asking(
    digest: str = "d", reply_to: str | None = "reply.a", tenant: TenantId = ACME
) -> ClaimAsked:
    return ClaimAsked(
        tenant=tenant,
        request_id=ID,
        digest=digest,
        reply_to=reply_to,
        kept_s=KEPT_S,
        model="tiny",
    )


def ended(final: bytes = b"answer", *, outcome: str = "completed", refused: bool = False) -> Ended:
    return Ended(
        tenant=ACME, request_id=ID, outcome=outcome, final=final, at=NOW, is_refusal=refused
    )


def advance_asked() -> Asked:
    return Asked(
        tenant=ACME,
        request_id=ID,
        digest="d",
        endpoint="/v1/completions",
        model="tiny",
        kept_s=KEPT_S,
    )


GROUPED = Grouped(tenant=ACME, request_id=ID, at=NOW, lane="lane.a", expected_at=NOW + 3.0)


async def claim(store: Store, holder: str = "grouper-1", **fields: object) -> ClaimOutcome:
    asked = asking(**fields)  # type: ignore[arg-type]  # names of fields
    [found] = await store.requests.claim([asked], holder)
    return found.outcome


async def test_the_first_message_is_claimed_and_a_repeat_joins_it(store: Store):
    first = await claim(store)
    await store.requests.mark_grouped([GROUPED])
    second = await claim(store, holder="grouper-2", reply_to="reply.b")
    third = await claim(store, reply_to="reply.c")
    [kept] = await store.requests.end([ended()])

    assert (first, second, third) == (
        ClaimOutcome.CLAIMED,
        ClaimOutcome.JOINED,
        ClaimOutcome.JOINED,
    )
    assert kept.final == b"answer"
    assert {waiter.reply_to for waiter in kept.waiters} == {"reply.b", "reply.c"}


async def test_a_repeat_after_the_end_gets_the_same_final(store: Store):
    await claim(store)
    await store.requests.mark_grouped([GROUPED])
    await store.requests.end([ended()])

    [found] = await store.requests.claim([asking()], "grouper-2")

    assert found == Claim(outcome=ClaimOutcome.ENDED, final=b"answer")


async def test_waiters_get_the_final_until_they_are_forgotten(store: Store):
    await claim(store)
    await store.requests.mark_grouped([GROUPED])
    await claim(store)

    [first] = await store.requests.end([ended()])
    [again] = await store.requests.end([ended(b"of a second run")])
    await store.requests.forget_waiters([waiter.id for waiter in first.waiters])
    [last] = await store.requests.end([ended()])

    assert again == first
    assert (last.final, last.waiters) == (b"answer", ())


async def test_end_has_the_run_that_answered_if_no_start_was_reported(store: Store):
    run = Started(tenant=ACME, request_id=ID, instance_id=InstanceId("a0"), at=NOW + 1.0)
    await claim(store)
    await store.requests.mark_grouped([GROUPED])
    await store.requests.end([msgspec.structs.replace(ended(), answered_by=run)])
    found = await store.requests.get(ACME, ID)
    await store.requests.mark_started([run])

    assert found is not None
    assert (found.instance_id, found.started_at, found.runs) == ("a0", NOW + 1.0, 1)
    assert await store.requests.get(ACME, ID) == found


async def test_end_with_a_run_keeps_the_number_of_reported_runs(store: Store):
    first = Started(tenant=ACME, request_id=ID, instance_id=InstanceId("a0"), at=NOW + 1.0)
    second = msgspec.structs.replace(first, instance_id=InstanceId("a1"), at=NOW + 2.0)
    await claim(store)
    await store.requests.mark_grouped([GROUPED])
    await store.requests.mark_started([first])
    await store.requests.mark_started([second])
    await store.requests.end([msgspec.structs.replace(ended(), answered_by=second)])
    found = await store.requests.get(ACME, ID)

    assert found is not None
    assert (found.instance_id, found.started_at, found.runs) == ("a1", NOW + 2.0, 2)


async def test_a_claimed_call_has_its_endpoint(store: Store):
    asked = msgspec.structs.replace(asking(), endpoint="/v1/embeddings")
    await store.requests.claim([asked], "grouper-1")
    found = await store.requests.get(ACME, ID)

    assert found is not None
    assert (found.endpoint, found.model) == ("/v1/embeddings", "tiny")


async def test_another_body_under_the_id_is_a_conflict_and_another_tenant_is_not(store: Store):
    await claim(store)

    assert await claim(store, digest="other") is ClaimOutcome.CONFLICT
    assert await claim(store, tenant=OTHER, digest="other") is ClaimOutcome.CLAIMED


async def test_a_claim_is_taken_over_when_its_grouper_has_not_grouped_it_in_time(
    store: Store, clock: ManualClock
):
    await claim(store)
    early = await claim(store, holder="grouper-2")
    own = await claim(store)
    clock.now += CLAIM_S
    late = await claim(store, holder="grouper-2")
    former = await claim(store)

    assert early is ClaimOutcome.BUSY
    assert own is ClaimOutcome.CLAIMED
    assert late is ClaimOutcome.CLAIMED
    assert former is ClaimOutcome.BUSY


async def test_a_refused_request_leaves_its_id_free(store: Store):
    await claim(store)
    await store.requests.release((ACME, ID), "grouper-1")

    assert await claim(store, digest="other") is ClaimOutcome.CLAIMED


async def test_a_former_holder_does_not_free_an_id_that_another_grouper_has(
    store: Store, clock: ManualClock
):
    await claim(store)
    clock.now += CLAIM_S
    await claim(store, holder="grouper-2")
    await store.requests.release((ACME, ID), "grouper-1")

    assert await claim(store, holder="grouper-3") is ClaimOutcome.BUSY


async def test_a_refusal_is_kept_for_a_request_that_was_asked_before(store: Store):
    made = await store.requests.ask([advance_asked()])
    again = await store.requests.ask([advance_asked()])
    claimed = await claim(store, reply_to=None)
    await store.requests.release((ACME, ID), "grouper-1")
    [kept] = await store.requests.end([ended(b"refused", outcome="invalid", refused=True)])
    row = await store.requests.get(ACME, ID)

    assert (made, again, claimed) == ([True], [False], ClaimOutcome.CLAIMED)
    assert kept.final == b"refused"
    assert row is not None
    assert (row.outcome, row.ended_at) == ("invalid", NOW)


async def test_a_refusal_is_not_kept_for_other_requests(store: Store):
    await claim(store)
    [kept] = await store.requests.end([ended(outcome="invalid", refused=True)])
    await store.requests.mark_grouped([GROUPED])
    [of_repeat] = await store.requests.end([ended(outcome="invalid", refused=True)])

    assert kept.final is None
    assert of_repeat.final is None


async def test_a_final_without_a_row_changes_nothing(store: Store):
    [kept] = await store.requests.end([ended()])

    assert kept.final is None
    assert await store.requests.get(ACME, ID) is None


async def test_the_row_says_where_the_request_is(store: Store):
    await claim(store)
    await store.requests.mark_grouped([GROUPED])
    started = Started(tenant=ACME, request_id=ID, instance_id=InstanceId("i"), at=NOW + 1.0)
    await store.requests.mark_started([started])
    await store.requests.mark_started([started])
    row = await store.requests.get(ACME, ID)

    assert row is not None
    assert (row.lane, row.expected_at, row.grouped_at) == ("lane.a", NOW + 3.0, NOW)
    assert (row.instance_id, row.started_at, row.runs) == ("i", NOW + 1.0, 2)
    assert await store.requests.get(OTHER, ID) is None


async def test_finals_expire_and_the_id_is_free_again(store: Store, clock: ManualClock):
    await claim(store)
    await store.requests.mark_grouped([GROUPED])
    await store.requests.end([ended()])
    lease = await store.leases.acquire("job", "a", duration_s=1e9)
    assert lease is not None

    clock.now += KEPT_S - 1.0
    kept = await store.requests.remove_expired(lease, limit=10)
    clock.now += 1.0
    invisible = await store.requests.get(ACME, ID)
    reused = await claim(store, digest="other")
    row = await store.requests.get(ACME, ID)
    removed = await store.requests.remove_expired(lease, limit=10)

    assert (kept, invisible) == (0, None)
    assert reused is ClaimOutcome.CLAIMED
    assert row is not None
    assert (row.digest, row.final, row.grouped_at) == ("other", None, None)
    assert removed == 0


async def test_of_concurrent_claims_one_wins(store: Store):
    outcomes = await asyncio.gather(*(claim(store, holder=f"grouper-{n}") for n in range(6)))

    assert sorted(each.value for each in outcomes) == ["busy"] * 5 + ["claimed"]


async def test_groups_of_claims_and_finals_in_any_order_do_not_block_each_other(store: Store):
    ids = [RequestId(f"r-{number:03}") for number in range(40)]

    async def claimed(order: list[RequestId], holder: str) -> None:
        asked = [msgspec.structs.replace(asking(), request_id=each) for each in order]
        await store.requests.claim(asked, holder)

    async def finished(order: list[RequestId]) -> None:
        await store.requests.end([msgspec.structs.replace(ended(), request_id=e) for e in order])

    await claimed(ids, "grouper-0")
    await asyncio.gather(
        claimed(ids, "grouper-1"),
        claimed(ids[::-1], "grouper-2"),
        finished(ids[::-1]),
        finished(ids),
    )

    assert len(await store.requests.ended(ACME, ids)) == len(ids)


async def test_only_rows_of_the_tenant_are_removed(store: Store):
    await claim(store)
    await store.requests.remove(OTHER, [ID])
    of_other = await store.requests.get(ACME, ID)
    await store.requests.remove(ACME, [ID])

    assert of_other is not None
    assert await store.requests.get(ACME, ID) is None
