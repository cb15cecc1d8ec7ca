"""Any interleaving of holders: every write that is committed has the newest token."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shared.contracts.errors import StaleLeaseError
from shared.store.leases import Lease
from shared.store.settings import StoreSettings
from tests.stores import ManualClock, a_file, open_store

HOLDERS = ("a", "b")
DURATION_S = 10.0
STEPS = st.one_of(
    st.tuples(st.sampled_from(("acquire", "renew", "write", "release")), st.sampled_from(HOLDERS)),
    st.tuples(st.just("wait"), st.sampled_from((4.0, 10.0))),
)
TAKEOVER: list[tuple[str, str | float]] = [
    ("acquire", "a"),
    ("write", "a"),
    ("wait", 10.0),
    ("write", "a"),
    ("acquire", "b"),
    ("write", "a"),
    ("renew", "a"),
    ("release", "a"),
    ("write", "b"),
    ("release", "b"),
    ("acquire", "a"),
    ("write", "b"),
]


@pytest.mark.parametrize("database_kind", ["sqlite", "postgresql"], indirect=True)
@given(steps=st.lists(STEPS, max_size=25))
@example(steps=TAKEOVER)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_only_the_newest_holder_writes(
    migrated: StoreSettings, tmp_path: Path, steps: list[tuple[str, str | float]]
):
    asyncio.run(_play(migrated, steps))


async def _play(migrated: StoreSettings, steps: list[tuple[str, str | float]]) -> None:
    """The steps against the database, and against a model: the token, its holder and its end."""
    clock = ManualClock()
    held: dict[str, Lease] = {}
    token, owner, until = 0, "", 0.0
    async with open_store(migrated, clock=clock) as store:
        file = a_file()
        await store.files.add(file, lambda _: None)
        name = f"job of {file.id}"
        for step, argument in steps:
            if isinstance(argument, float):
                clock.now += argument
                continue
            lease = held.get(argument)
            if step == "acquire":
                taken = await store.leases.acquire(name, argument, duration_s=DURATION_S)
                assert (taken is not None) == (until <= clock.now)
                if taken is not None:
                    token, owner, until = token + 1, argument, clock.now + DURATION_S
                    assert (taken.token, taken.until) == (token, until)
                    held[argument] = taken
            elif lease is not None:
                is_current = lease.token == token
                assert not is_current or argument == owner
                if step == "release":
                    await store.leases.release(lease)
                    until = 0.0 if is_current else until
                    continue
                try:
                    if step == "renew":
                        held[argument] = await store.leases.renew(lease, duration_s=DURATION_S)
                        until = clock.now + DURATION_S
                    else:
                        await store.files.mark(lease, [file.id], "lost")
                except StaleLeaseError:
                    assert not is_current
                else:
                    assert is_current
