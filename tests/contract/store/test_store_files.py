"""Rows of files: tenants, pages, expiry and totals."""

import asyncio

import pytest

from shared.contracts.errors import CapacityError
from shared.store.files import Totals
from shared.store.store import Store
from tests.stores import ACME, NOW, OTHER, ManualClock, a_file


def anyone(_totals: Totals) -> None:
    """Admit every file."""


async def test_a_file_is_found_by_its_tenant_alone(store: Store):
    await store.files.add(file := a_file(expires_at=NOW + 5.0), anyone)

    assert await store.files.get(ACME, file.id) == file
    assert await store.files.get(OTHER, file.id) is None
    assert await store.files.remove(OTHER, file.id) is None
    assert await store.files.remove(ACME, file.id) == file
    assert await store.files.get(ACME, file.id) is None


async def test_pages_follow_the_order_of_creation(store: Store):
    made = [a_file(made_at=NOW + number) for number in range(5)]
    for file in (*made, a_file(OTHER)):
        await store.files.add(file, anyone)
    ids = [file.id for file in made]

    newest, more = await store.files.page(ACME, limit=2)
    rest, no_more = await store.files.page(ACME, limit=3, after=newest[-1].id)
    oldest, _ = await store.files.page(ACME, limit=2, order="asc", after=ids[0])

    assert ([file.id for file in newest], more) == ([ids[4], ids[3]], True)
    assert ([file.id for file in rest], no_more) == ([ids[2], ids[1], ids[0]], False)
    assert [file.id for file in oldest] == [ids[1], ids[2]]


async def test_a_page_continues_after_a_file_that_was_deleted(store: Store):
    made = [a_file(made_at=NOW + number) for number in range(3)]
    for file in made:
        await store.files.add(file, anyone)
    await store.files.remove(ACME, made[1].id)

    page, _ = await store.files.page(ACME, limit=9, after=made[1].id)

    assert [file.id for file in page] == [made[0].id]


async def test_pages_are_restricted_to_a_purpose(store: Store):
    for purpose in ("batch", "vision"):
        await store.files.add(a_file(purpose=purpose), anyone)

    page, more = await store.files.page(ACME, limit=1, purpose="vision")

    assert ([file.purpose for file in page], more) == (["vision"], False)


async def test_an_expired_file_is_invisible_before_it_is_deleted(store: Store, clock: ManualClock):
    await store.files.add(file := a_file(expires_at=NOW + 5.0), anyone)
    clock.now = NOW + 5.0

    assert await store.files.get(ACME, file.id) is None
    assert await store.files.page(ACME, limit=9) == ([], False)
    assert await store.files.remove(ACME, file.id) is None
    assert await store.files.totals(ACME) == (clock.now, Totals(1, 10))


async def test_expired_files_of_all_tenants_are_removed_by_the_holder_of_the_job(
    store: Store, clock: ManualClock
):
    expired = [a_file(tenant, expires_at=NOW + 5.0) for tenant in (ACME, OTHER)]
    kept = [a_file(expires_at=NOW + 6.0), a_file()]
    for file in (*expired, *kept):
        await store.files.add(file, anyone)
    clock.now = NOW + 5.0
    lease = await store.leases.acquire("job", "a", duration_s=10.0)
    assert lease is not None

    first = await store.files.remove_expired(lease, limit=1)
    second = await store.files.remove_expired(lease, limit=9)

    assert {file.id for file in (*first, *second)} == {file.id for file in expired}
    assert len(first) == 1
    assert await store.files.totals(ACME) == (clock.now, Totals(2, 20))


async def test_limits_hold_for_files_that_are_added_at_once(store: Store):
    """Each transaction sees the totals after those before it."""
    limit = 3

    def admit(totals: Totals) -> None:
        if totals.num_files >= limit:
            raise CapacityError("full", retry_after_s=1.0)

    results = await asyncio.gather(
        *(store.files.add(a_file(), admit) for _ in range(8)), return_exceptions=True
    )

    assert [result for result in results if result is None] == [None] * limit
    assert (await store.files.totals(ACME))[1] == Totals(limit, 10 * limit)


async def test_a_refused_file_leaves_no_row(store: Store):
    def refuse(_totals: Totals) -> None:
        raise CapacityError("full", retry_after_s=1.0)

    with pytest.raises(CapacityError):
        await store.files.add(file := a_file(), refuse)

    assert await store.files.get(ACME, file.id) is None


async def test_rows_are_found_by_the_folder_of_their_bodies(store: Store):
    near, far = a_file(), a_file(made_at=NOW + 1e6)
    for file in (near, far):
        await store.files.add(file, anyone)
    folders = await store.files.folders()
    found = {folder: await store.files.in_folder(folder) for folder in folders}

    assert len(folders) == 2
    assert sorted(row.id for rows in found.values() for row in rows) == [near.id, far.id]
