"""Rows of requests that are made before the requests are published."""

import pytest
from sqlalchemy.exc import DBAPIError

from shared.contracts.base import RequestId, TenantId
from shared.store.requests.records import Asked, ClaimAsked, Ended
from shared.store.requests.rows import UNENDED_S
from shared.store.store import Store
from tests.stores import ACME, OTHER, ManualClock

KEPT_S = 60.0


def an_ask(digest: str = "d", *, tenant: TenantId = ACME, endpoint: str = "/v1/chat") -> Asked:
    return Asked(
        tenant=tenant,
        request_id=RequestId("r1"),
        digest=digest,
        endpoint=endpoint,
        model="tiny",
        kept_s=KEPT_S,
    )


async def test_first_ask_of_an_id_makes_the_row(store: Store, clock: ManualClock):
    made = await store.requests.ask([an_ask(), an_ask(tenant=OTHER)])
    again = await store.requests.ask([an_ask("d2")])
    row = await store.requests.get(ACME, RequestId("r1"))

    assert (made, again) == ([True, True], [False])
    assert row is not None
    assert (row.digest, row.is_asked, row.endpoint) == ("d", True, "/v1/chat")
    assert (row.created_at, row.expires_at) == (clock.now, clock.now + UNENDED_S)


async def test_id_of_an_expired_row_is_free(store: Store, clock: ManualClock):
    """The job that deletes expired rows may be late."""
    rows = store.requests
    await rows.ask([an_ask()])
    ended = Ended(
        tenant=ACME,
        request_id=RequestId("r1"),
        outcome="completed",
        final=b"{}",
        at=clock.now,
    )
    await rows.end([ended])
    clock.now += KEPT_S - 1.0
    early = await rows.ask([an_ask("d2")])
    clock.now += 1.0
    late = await rows.ask([an_ask("d2", endpoint="/v1/other")])
    row = await rows.get(ACME, RequestId("r1"))

    assert (early, late) == ([False], [True])
    assert row is not None
    assert (row.digest, row.endpoint, row.final, row.runs) == ("d2", "/v1/other", None, 0)


async def test_withdrawn_id_is_free_unless_it_is_claimed(store: Store):
    rows = store.requests
    await rows.ask([an_ask(), an_ask(tenant=OTHER)])
    claimed = ClaimAsked(
        tenant=OTHER,
        request_id=RequestId("r1"),
        digest="d",
        reply_to=None,
        kept_s=KEPT_S,
        model="tiny",
    )
    await rows.claim([claimed], "grouper")
    for tenant in (ACME, OTHER):
        await rows.withdraw((tenant, RequestId("r1")))

    assert await rows.get(ACME, RequestId("r1")) is None
    assert await rows.get(OTHER, RequestId("r1")) is not None


async def test_a_value_that_the_database_refuses_does_not_count_as_an_outage(
    store: Store, database_kind: str
):
    ask = store.requests.ask([an_ask("with NUL: \0")])
    if database_kind == "sqlite":
        assert await ask == [True]
    else:
        with pytest.raises(DBAPIError, match="invalid byte sequence"):
            await ask
