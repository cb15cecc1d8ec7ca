"""Rows of batches: tenants, runners, takeovers, and ends with files in one transaction."""

import pytest

from shared.contracts.errors import StaleLeaseError
from shared.store.leases import Lease
from shared.store.objects.batches import JOB, BatchCounts, BatchEnd, BatchStatus, KeptBatches
from shared.store.store import Store
from tests.stores import ACME, NOW, OTHER, ManualClock, a_batch, a_file

LEASE_S = 10.0


async def lease_of(store: Store, batch_id: str, holder: str = "a") -> Lease:
    lease = await store.leases.acquire(JOB + batch_id, holder, duration_s=LEASE_S)
    assert lease is not None
    return lease


async def test_a_batch_is_found_by_its_tenant_alone(store: Store):
    await store.batches.add(batch := a_batch(slo="{}", metadata='{"a":"b"}', output_expires_s=9.0))

    assert await store.batches.get(ACME, batch.id) == batch
    assert await store.batches.get(OTHER, batch.id) is None
    assert await store.batches.cancel(OTHER, batch.id) is None


async def test_pages_begin_with_the_newest(store: Store):
    made = [a_batch(made_at=NOW + number) for number in range(4)]
    for batch in (*made, a_batch(OTHER)):
        await store.batches.add(batch)
    ids = [batch.id for batch in made]

    newest, more = await store.batches.page(ACME, limit=3)
    rest, no_more = await store.batches.page(ACME, limit=3, after=newest[-1].id)

    assert ([batch.id for batch in newest], more) == (ids[:0:-1], True)
    assert ([batch.id for batch in rest], no_more) == (ids[:1], False)


async def test_a_batch_without_a_runner_is_one_whose_lease_has_ended(
    store: Store, clock: ManualClock
):
    urgent, other = a_batch(expires_at=NOW + 60.0), a_batch()
    ended = a_batch(status=BatchStatus.COMPLETED)
    for batch in (other, urgent, ended):
        await store.batches.add(batch)
    found = await store.batches.without_runner(limit=9)
    lease = await lease_of(store, urgent.id)
    while_held = await store.batches.without_runner(limit=9)
    clock.now += LEASE_S
    after = await store.batches.without_runner(limit=1)
    await store.leases.forget(lease)

    assert [batch.id for batch in found] == [urgent.id, other.id]
    assert [batch.id for batch in while_held] == [other.id]
    assert [batch.id for batch in after] == [urgent.id]
    assert await store.leases.acquire(lease.name, "b", duration_s=1.0) is not None


async def test_a_batch_goes_from_its_check_to_its_end(store: Store, clock: ManualClock):
    await store.batches.add(batch := a_batch())
    lease, rows = await lease_of(store, batch.id), store.batches

    await rows.begin(lease, batch.id, num_lines=5, num_failed=1)
    begun = await rows.get(ACME, batch.id)
    await rows.move_cursor(lease, batch.id, 4)
    counts = BatchCounts(num_completed=2, num_failed=1, lines_per_s=0.5, expected_at=NOW + 9.0)
    status = await rows.count(lease, batch.id, counts)
    clock.now += 5.0
    await rows.finalize(lease, batch.id)
    output = a_file(purpose="batch_output")
    end = BatchEnd(
        status=BatchStatus.COMPLETED,
        counts=BatchCounts(num_completed=4, num_failed=1),
        output=output,
    )
    await rows.end(lease, batch.id, end)
    ended = await rows.get(ACME, batch.id)

    assert begun is not None
    assert (begun.status, begun.in_progress_at) == (BatchStatus.IN_PROGRESS, NOW)
    assert (begun.num_lines, begun.num_failed) == (5, 1)
    assert status is BatchStatus.IN_PROGRESS
    assert ended is not None
    assert (ended.status, ended.finalizing_at, ended.ended_at) == (
        BatchStatus.COMPLETED,
        NOW + 5.0,
        NOW + 5.0,
    )
    assert (ended.submitted_lines, ended.num_completed, ended.expected_at) == (4, 4, None)
    assert (ended.output_file_id, ended.error_file_id) == (output.id, None)
    assert await store.files.get(ACME, output.id) == output
    assert not ended.is_open


async def test_a_former_runner_changes_nothing(store: Store, clock: ManualClock):
    await store.batches.add(batch := a_batch())
    former, rows = await lease_of(store, batch.id), store.batches
    clock.now += LEASE_S
    await lease_of(store, batch.id, "b")
    output = a_file()
    counts = BatchCounts(num_completed=9, num_failed=9)
    end = BatchEnd(status=BatchStatus.COMPLETED, counts=counts, output=output)

    for write in (
        rows.begin(former, batch.id, num_lines=1, num_failed=0),
        rows.move_cursor(former, batch.id, 1),
        rows.count(former, batch.id, counts),
        rows.finalize(former, batch.id),
        rows.end(former, batch.id, end),
    ):
        with pytest.raises(StaleLeaseError):
            await write

    assert await rows.get(ACME, batch.id) == batch
    assert await store.files.get(ACME, output.id) is None


async def test_a_cancellation_reaches_the_runner_with_its_next_count(store: Store):
    await store.batches.add(batch := a_batch())
    lease, rows = await lease_of(store, batch.id), store.batches
    await rows.begin(lease, batch.id, num_lines=1, num_failed=0)

    cancelled = await rows.cancel(ACME, batch.id)
    status = await rows.count(lease, batch.id, BatchCounts(num_completed=0, num_failed=0))
    await rows.finalize(lease, batch.id)
    again = await rows.cancel(ACME, batch.id)

    assert cancelled is not None
    assert (cancelled.status, cancelled.cancelling_at) == (BatchStatus.CANCELLING, NOW)
    assert status is BatchStatus.CANCELLING
    assert again == cancelled


async def test_a_batch_that_is_cancelled_during_its_check_does_not_begin(store: Store):
    await store.batches.add(batch := a_batch())
    await store.batches.cancel(ACME, batch.id)
    lease = await lease_of(store, batch.id)
    await store.batches.begin(lease, batch.id, num_lines=3, num_failed=1)
    found = await store.batches.get(ACME, batch.id)

    assert found is not None
    assert (found.status, found.num_lines) == (BatchStatus.CANCELLING, 3)


async def test_an_ended_batch_is_not_cancelled(store: Store):
    await store.batches.add(batch := a_batch(status=BatchStatus.EXPIRED))

    assert await store.batches.cancel(ACME, batch.id) == batch


async def test_a_file_is_read_until_its_batch_has_ended(store: Store):
    await store.batches.add(batch := a_batch())
    await store.batches.add(ended := a_batch(status=BatchStatus.COMPLETED))

    assert await store.batches.reads(ACME, batch.input_file_id)
    assert not await store.batches.reads(OTHER, batch.input_file_id)
    assert not await store.batches.reads(ACME, ended.input_file_id)


async def test_batches_are_removed_once_their_time_since_the_end_has_passed(
    store: Store, clock: ManualClock
):
    old = a_batch(status=BatchStatus.COMPLETED, ended_at=NOW)
    young = a_batch(status=BatchStatus.EXPIRED, ended_at=NOW + 50.0)
    running = a_batch()
    others = a_batch(OTHER, status=BatchStatus.FAILED, ended_at=NOW)
    for batch in (old, young, running, others):
        await store.batches.add(batch)
    lease = await lease_of(store, old.id)
    kept = KeptBatches(default_s=100.0, tenants_s={OTHER: None})
    before = await store.batches.remove_ended(lease, kept, limit=9)
    clock.now += 100.0
    lease = await lease_of(store, old.id)
    removed = await store.batches.remove_ended(lease, kept, limit=9)
    left = [batch.id for batch in (await store.batches.page(ACME, limit=9))[0]]

    assert (before, removed) == (0, 1)
    assert sorted(left) == sorted([young.id, running.id])
    assert await store.batches.get(OTHER, others.id) == others


async def test_times_of_tenants_replace_the_default_when_batches_are_removed(
    store: Store, clock: ManualClock
):
    batches = [a_batch(OTHER, status=BatchStatus.COMPLETED, ended_at=NOW) for _ in range(3)]
    for batch in batches:
        await store.batches.add(batch)
    clock.now += 10.0
    lease = await lease_of(store, batches[0].id)
    forever = await store.batches.remove_ended(lease, KeptBatches(default_s=None), limit=9)
    kept = KeptBatches(default_s=100.0, tenants_s={OTHER: 5.0})
    removed = [await store.batches.remove_ended(lease, kept, limit=2) for _ in range(3)]

    assert (forever, removed) == (0, [2, 1, 0])
