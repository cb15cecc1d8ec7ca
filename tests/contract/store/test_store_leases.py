"""Leases: expiry by the database's clock, takeovers, and writes of former holders."""

import asyncio

import pytest
from sqlalchemy import select

from shared.contracts.errors import StaleLeaseError
from shared.store.database import Database
from shared.store.files import LOST, STORED
from shared.store.leases import Lease
from shared.store.schema import leases
from shared.store.settings import StoreSettings
from shared.store.store import Store
from tests.stores import ManualClock, a_file, place


async def acquired(store: Store, holder: str, *, duration_s: float = 10.0) -> Lease:
    lease = await store.leases.acquire("job", holder, duration_s=duration_s)
    assert lease is not None
    return lease


async def test_a_lease_has_one_holder_at_a_time(store: Store, clock: ManualClock):
    first = await acquired(store, "a")
    refused = await store.leases.acquire("job", "b", duration_s=10.0)
    again = await store.leases.acquire("job", "a", duration_s=10.0)
    other = await store.leases.acquire("other job", "b", duration_s=10.0)

    assert (first.token, first.until) == (1, clock.now + 10.0)
    assert refused is None
    assert again is None
    assert other is not None


async def test_an_ended_lease_is_taken_over_with_a_higher_token(store: Store, clock: ManualClock):
    first = await acquired(store, "a")
    clock.now += 9.9
    early = await store.leases.acquire("job", "b", duration_s=10.0)
    clock.now += 0.1
    second = await acquired(store, "b")

    assert early is None
    assert second.token == first.token + 1


async def test_a_renewed_lease_lives_longer(store: Store, clock: ManualClock):
    lease = await acquired(store, "a")
    clock.now += 9.0
    renewed = await store.leases.renew(lease, duration_s=10.0)
    clock.now += 9.0

    assert renewed.until == clock.now + 1.0
    assert await store.leases.acquire("job", "b", duration_s=10.0) is None


async def test_an_ended_lease_that_no_process_took_can_be_renewed(store: Store, clock: ManualClock):
    lease = await acquired(store, "a")
    clock.now += 100.0

    assert (await store.leases.renew(lease, duration_s=10.0)).token == lease.token


async def test_a_released_lease_is_free_and_its_token_still_grows(store: Store):
    lease = await acquired(store, "a")
    await store.leases.release(lease)

    assert (await acquired(store, "b")).token == lease.token + 1


async def test_a_former_holder_can_neither_renew_nor_release_nor_write(
    store: Store, clock: ManualClock
):
    await store.files.add(file := a_file(), lambda _: None)
    former = await acquired(store, "a")
    clock.now += 10.0
    current = await acquired(store, "b")

    with pytest.raises(StaleLeaseError, match="a no longer holds it"):
        await store.leases.renew(former, duration_s=10.0)
    with pytest.raises(StaleLeaseError):
        await store.files.mark(former, [file.id], LOST)
    await store.leases.release(former)

    found = await store.files.get(file.tenant, file.id)
    assert found is not None
    assert found.status == STORED
    assert await store.leases.acquire("job", "c", duration_s=10.0) is None
    await store.files.mark(current, [file.id], LOST)


async def test_a_takeover_waits_for_a_write_in_progress(store: Store, clock: ManualClock):
    """Else the former holder could commit after the new one has begun."""
    lease = await acquired(store, "a")
    clock.now += 10.0
    async with store.leases.fenced(lease) as connection:
        taking = asyncio.create_task(acquired(store, "b"))
        await connection.execute(select(leases))
        await asyncio.sleep(0.1)
        waits = not taking.done()

    assert waits
    assert (await taking).token == lease.token + 1


async def test_the_clock_is_the_databases(migrated: StoreSettings):
    database = Database(place(migrated).url, timeout_s=20.0)
    first, second = await database.time(), await database.time()
    await database.close()

    assert 1_700_000_000 < first <= second < first + 60
