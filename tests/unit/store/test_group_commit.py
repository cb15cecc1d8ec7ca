"""Group commits: what is written together, and what errors and cancellations do."""

import asyncio
from collections.abc import Sequence

import pytest

from shared.contracts.errors import StoreFullError
from shared.store.group_commit import GroupCommit

pytestmark = pytest.mark.virtual_time

REFUSED = 13
"""An item that the database refuses."""


class Writer:
    """Records groups; each transaction waits until the test lets it end."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.may_end = asyncio.Semaphore(0)
        self.error: Exception | None = None

    async def write(self, items: Sequence[int]) -> list[int]:
        self.groups.append(list(items))
        await self.may_end.acquire()
        if self.error is not None:
            raise self.error
        if REFUSED in items:
            raise ValueError("refused")
        return [item * 10 for item in items]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_items_that_arrive_during_a_transaction_are_the_next_group():
    writer = Writer()
    commits = GroupCommit(writer.write)
    first = asyncio.create_task(commits.submit(1))
    await settle()
    rest = [asyncio.create_task(commits.submit(number)) for number in (2, 3, 4)]
    await settle()
    writer.may_end.release()
    writer.may_end.release()

    assert await first == 10
    assert await asyncio.gather(*rest) == [20, 30, 40]
    assert writer.groups == [[1], [2, 3, 4]]


async def test_groups_are_bounded():
    writer = Writer()
    commits = GroupCommit(writer.write, max_items=2)
    tasks = [asyncio.create_task(commits.submit(number)) for number in range(5)]
    for _ in range(3):
        writer.may_end.release()

    assert await asyncio.gather(*tasks) == [0, 10, 20, 30, 40]
    assert [len(group) for group in writer.groups] == [2, 2, 1]


async def test_items_of_a_period_are_one_group():
    writer = Writer()
    writer.may_end = asyncio.Semaphore(3)
    commits = GroupCommit(writer.write, period_s=0.05, max_items=3)
    first = await commits.submit(1)
    second = asyncio.create_task(commits.submit(2))
    await asyncio.sleep(0.04)
    third = asyncio.create_task(commits.submit(3))
    others = await asyncio.gather(second, third)
    await asyncio.sleep(0.05)
    begun = asyncio.get_running_loop().time()
    last = await commits.submit(4)

    assert (first, others, last) == (10, [20, 30], 40)
    assert writer.groups == [[1], [2, 3], [4]]
    assert asyncio.get_running_loop().time() == begun


async def test_a_full_group_does_not_wait_for_the_period():
    writer = Writer()
    writer.may_end = asyncio.Semaphore(2)
    commits = GroupCommit(writer.write, period_s=60.0, max_items=2)
    await commits.submit(1)
    begun = asyncio.get_running_loop().time()

    assert await asyncio.gather(commits.submit(2), commits.submit(3)) == [20, 30]
    assert asyncio.get_running_loop().time() == begun


async def test_an_error_reaches_each_caller_of_its_group_alone():
    writer = Writer()
    commits = GroupCommit(writer.write)
    writer.error = StoreFullError("disk")
    failed = [asyncio.create_task(commits.submit(number)) for number in (1, 2)]
    writer.may_end.release()
    errors = await asyncio.gather(*failed, return_exceptions=True)
    writer.error = None
    writer.may_end.release()

    assert [str(error) for error in errors] == ["disk", "disk"]
    assert await commits.submit(3) == 30
    assert writer.groups == [[1, 2], [3]]


async def test_an_item_that_is_refused_fails_its_caller_only():
    writer = Writer()
    writer.may_end = asyncio.Semaphore(4)
    commits = GroupCommit(writer.write)
    answers = await asyncio.gather(
        *(commits.submit(item) for item in (1, REFUSED, 3)), return_exceptions=True
    )

    assert [str(answer) for answer in answers] == ["10", "refused", "30"]
    assert writer.groups == [[1, REFUSED, 3], [1], [REFUSED], [3]]


async def test_a_cancelled_caller_stops_neither_its_transaction_nor_others():
    writer = Writer()
    commits = GroupCommit(writer.write)
    gone, stays = (asyncio.create_task(commits.submit(number)) for number in (1, 2))
    await settle()
    gone.cancel()
    writer.may_end.release()

    with pytest.raises(asyncio.CancelledError):
        await gone
    assert await stays == 20
    assert writer.groups == [[1, 2]]
