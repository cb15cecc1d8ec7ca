"""The keeper of usage drops what is too old."""

from services.estimator.usage.keeper import UsageKeeper
from shared.broker.memory.broker import MemoryBroker
from shared.broker.memory.hub import MemoryHub
from shared.contracts.tenants.usage import HOUR_S
from tests.clocks import FakeClock
from tests.unit.estimator.usage.finals import final


async def test_hours_that_begin_before_the_kept_time_are_dropped() -> None:
    """With one day kept, an hour is dropped as soon as a part of it is older."""
    clock = FakeClock(100 * HOUR_S + 1.0)
    async with MemoryBroker(MemoryHub()) as broker:
        keeper = UsageKeeper(broker=broker, clock=clock, directory=None, keep_s=24 * HOUR_S)
        for name, hour in (("r1", 76), ("r2", 77), ("r3", 100)):
            keeper.book.add(final(name, finished_at=hour * HOUR_S))
        await keeper.compact()

    assert [key[1] // HOUR_S for key in keeper.book.rows] == [77, 100]
