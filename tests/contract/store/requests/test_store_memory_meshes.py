"""Requests of meshes whose broker was in memory, after these meshes are gone."""

from shared.contracts.base import RequestId
from shared.store.requests.memory_meshes import HELD_S, MemoryMeshes, MeshHold
from shared.store.requests.records import Asked, ClaimAsked, ClaimOutcome, Ended, Grouped
from shared.store.requests.rows import RequestRows
from shared.store.store import Store
from tests.stores import ACME, NOW, ManualClock

FIRST, SECOND = "mesh-1", "mesh-2"
GROUPED = Grouped(tenant=ACME, request_id=RequestId("r1"), at=NOW, lane="lane", expected_at=None)


def rows_of(store: Store, mesh: str | None) -> RequestRows:
    return RequestRows(store.database, store.leases, memory_mesh=mesh)


def asked(name: str) -> Asked:
    return Asked(
        tenant=ACME,
        request_id=RequestId(name),
        digest="d",
        endpoint="/v1/chat/completions",
        model="tiny",
        kept_s=60.0,
    )


def claimed(name: str, reply_to: str | None = None) -> ClaimAsked:
    return ClaimAsked(
        tenant=ACME,
        request_id=RequestId(name),
        digest="d",
        reply_to=reply_to,
        kept_s=60.0,
        model="tiny",
    )


async def lost_of(meshes: MemoryMeshes, own: str | None) -> dict[str, list[tuple[str, bool]]]:
    """Name of the lease of each mesh that is gone -> its requests, and whether they were asked."""
    return {
        lease.name: sorted((each.id, each.is_asked) for each in await meshes.lost(lease, limit=9))
        for lease in await meshes.gone("grouper", own=own)
    }


async def test_open_requests_of_a_mesh_are_lost_when_it_is_gone(store: Store, clock: ManualClock):
    meshes, rows = store.memory_meshes, rows_of(store, FIRST)
    hold = MeshHold(meshes, FIRST)
    await hold.show()
    await rows.ask([asked("asked")])
    await rows.claim([claimed("claimed"), claimed("ended")], "grouper-1")
    end = Ended(
        tenant=ACME, request_id=RequestId("ended"), outcome="completed", final=b"{}", at=NOW
    )
    await rows.end([end])
    await rows_of(store, None).ask([asked("of-rabbitmq")])
    clock.now += HELD_S - 1.0
    await hold.show()
    clock.now += HELD_S - 1.0
    early = await lost_of(meshes, SECOND)
    clock.now += 1.0

    assert early == {}
    assert await lost_of(meshes, FIRST) == {}
    assert await lost_of(meshes, SECOND) == {
        f"memory-mesh:{FIRST}": [("asked", True), ("claimed", False)]
    }


async def test_a_mesh_that_stops_in_order_is_gone_at_once(store: Store):
    hold = MeshHold(store.memory_meshes, FIRST)
    await hold.show()
    await hold.end()
    [lease] = await store.memory_meshes.gone("grouper", own=None)
    others = await store.memory_meshes.gone("other", own=None)
    await store.memory_meshes.forget(lease)

    assert others == []
    assert await store.memory_meshes.gone("other", own=None) == []


async def test_a_freed_id_can_be_asked_again_and_its_repeats_are_known(store: Store):
    meshes, rows = store.memory_meshes, rows_of(store, FIRST)
    hold = MeshHold(meshes, FIRST)
    await hold.show()
    again = rows_of(store, SECOND)
    await rows.claim([claimed("r1")], "grouper-1")
    await rows.mark_grouped([GROUPED])
    [joined] = await again.claim([claimed("r1", "replies-2")], "grouper-2")
    await hold.end()
    [lease] = await meshes.gone("grouper-2", own=SECOND)
    freed = await meshes.free(lease, [(ACME, RequestId("r1"))])
    [claim] = await again.claim([claimed("r1")], "grouper-2")
    unchanged = await meshes.free(lease, [(ACME, RequestId("r1"))])
    [repeat] = await again.claim([claimed("r1")], "grouper-2")

    assert joined.outcome is ClaimOutcome.JOINED
    assert (freed, unchanged) == ({(ACME, RequestId("r1")): ["replies-2"]}, {})
    assert claim.outcome is ClaimOutcome.CLAIMED
    assert repeat.outcome is ClaimOutcome.CLAIMED
    row = await store.requests.get(ACME, RequestId("r1"))
    assert row is not None
    assert row.memory_mesh == SECOND
