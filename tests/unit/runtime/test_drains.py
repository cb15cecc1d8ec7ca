"""The end of a drain: empty, out of time, or without a broker."""

import asyncio

import pytest

from shared.runtime.tasks import BROKER_GONE_S, drained

pytestmark = pytest.mark.virtual_time


async def drain(
    *, empty_after_s: float, timeout_s: float = 30.0, gone: tuple[float, float] = (1e9, 1e9)
) -> tuple[bool, float]:
    """Result and duration of a drain during which the broker is gone between two times."""
    loop = asyncio.get_running_loop()
    begun_at = loop.time()

    def passed_s() -> float:
        return loop.time() - begun_at

    is_empty = await drained(
        lambda: passed_s() >= empty_after_s,
        lambda: not gone[0] <= passed_s() < gone[1],
        timeout_s=timeout_s,
    )
    return is_empty, passed_s()


async def test_a_drain_ends_when_the_service_is_empty():
    assert await drain(empty_after_s=7.0) == (True, pytest.approx(7.0, abs=0.1))


async def test_a_drain_ends_at_its_time_limit():
    assert await drain(empty_after_s=60.0) == (False, pytest.approx(30.0, abs=0.1))


async def test_a_drain_ends_when_the_broker_stays_away():
    ends = await drain(empty_after_s=60.0, gone=(2.0, 1e9))
    assert ends == (False, pytest.approx(2.0 + BROKER_GONE_S, abs=0.2))


async def test_a_drain_continues_when_the_broker_comes_back():
    ends = await drain(empty_after_s=20.0, gone=(2.0, 6.0))
    assert ends == (True, pytest.approx(20.0, abs=0.1))
