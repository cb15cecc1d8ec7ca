"""Rows of webhook deliveries."""

import msgspec
import pytest

from shared.contracts.base import TenantId
from shared.contracts.errors import StaleLeaseError
from shared.store.leases import Lease
from shared.store.objects.webhooks import DELIVERED, Attempted, Delivery, Notice, enqueue
from shared.store.store import Store
from tests.stores import ACME, ManualClock

URL = "https://a.example/hook"


async def enqueued(store: Store, *urls: str, number: int = 1, tenant: TenantId = ACME) -> None:
    notices = [
        Notice(tenant=tenant, type="response.failed", object_id=f"resp_{each}", urls=urls)
        for each in range(number)
    ]
    async with store.database.write() as connection:
        await enqueue(connection, store.database, notices)


async def lease_of(store: Store) -> Lease:
    lease = await store.leases.acquire("webhooks", "a", duration_s=10.0)
    assert lease is not None
    return lease


def attempted(delivery: Delivery, outcome: str, retry_in_s: float | None) -> Attempted:
    return Attempted(
        event_id=delivery.event_id, url=delivery.url, outcome=outcome, retry_in_s=retry_in_s
    )


async def test_an_event_has_one_delivery_for_each_url_with_openais_payload(
    store: Store, clock: ManualClock
):
    await enqueued(store, URL, "https://b.example/", URL)
    clock.now += 2.0
    due = await store.deliveries.due(limit=10, limit_per_url=10)

    assert [each.url for each in due] == [URL, "https://b.example/"]
    payload = msgspec.json.decode(due[0].payload)
    assert payload == {
        "id": due[0].event_id,
        "object": "event",
        "created_at": int(clock.now - 2.0),
        "type": "response.failed",
        "data": {"id": "resp_0"},
    }
    assert (due[0].tenant, due[0].attempts, due[0].age_s) == (ACME, 0, pytest.approx(2.0))


async def test_an_event_without_urls_leaves_nothing(store: Store):
    await enqueued(store)

    assert await store.deliveries.due(limit=10, limit_per_url=10) == []


async def test_one_url_does_not_take_all_places(store: Store, clock: ManualClock):
    await enqueued(store, URL, number=5)
    clock.now += 1.0
    await enqueued(store, "https://b.example/")

    due = await store.deliveries.due(limit=4, limit_per_url=2)

    assert [each.url for each in due] == [URL, URL, "https://b.example/"]
    assert len(await store.deliveries.due(limit=1, limit_per_url=2)) == 1


async def test_a_failed_attempt_is_due_again_after_its_delay(store: Store, clock: ManualClock):
    await enqueued(store, URL)
    lease = await lease_of(store)
    (delivery,) = await store.deliveries.due(limit=10, limit_per_url=10)

    await store.deliveries.settle(lease, [attempted(delivery, "status 500", 5.0)])
    clock.now += 4.0
    early = await store.deliveries.due(limit=10, limit_per_url=10)
    clock.now += 1.0
    (again,) = await store.deliveries.due(limit=10, limit_per_url=10)

    assert early == []
    assert (again.event_id, again.attempts) == (delivery.event_id, 1)


async def test_an_ended_delivery_is_kept_for_a_time(store: Store, clock: ManualClock):
    await enqueued(store, URL)
    lease = await lease_of(store)
    (delivery,) = await store.deliveries.due(limit=10, limit_per_url=10)
    await store.deliveries.settle(lease, [attempted(delivery, DELIVERED, None)])
    clock.now += 99.0
    kept = await store.deliveries.remove_ended(lease, older_than_s=100.0, limit=10)
    clock.now += 1.0
    removed = await store.deliveries.remove_ended(lease, older_than_s=100.0, limit=10)

    assert await store.deliveries.due(limit=10, limit_per_url=10) == []
    assert (kept, removed) == (0, 1)


async def test_only_the_holder_of_the_job_notes_results(store: Store):
    await enqueued(store, URL)
    lease = await lease_of(store)
    (delivery,) = await store.deliveries.due(limit=10, limit_per_url=10)
    stale = msgspec.structs.replace(lease, token=lease.token + 1)

    with pytest.raises(StaleLeaseError):
        await store.deliveries.settle(stale, [attempted(delivery, DELIVERED, None)])

    assert len(await store.deliveries.due(limit=10, limit_per_url=10)) == 1
