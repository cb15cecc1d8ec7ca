"""Events of responses that another gateway runs, as readers here get them."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from services.gateway.responses.feed import Feed
from shared.store.objects.responses import Progress, StoredEvent
from tests.stores import an_event

RESPONSE = "resp_1"


class Rows:
    """The rows of one response, which another gateway writes."""

    def __init__(self) -> None:
        self.stored = [an_event(0, "response.created"), an_event(1, "response.queued")]
        self.is_running = True

    def end(self) -> None:
        self.stored.append(an_event(len(self.stored), "response.completed"))
        self.is_running = False

    async def events(
        self, _response_id: str, *, after: int = -1, limit: int | None = None
    ) -> list[StoredEvent]:
        return [each for each in self.stored if each.number > after][:limit]

    async def progress(self, response_ids: Iterable[str]) -> dict[str, Progress]:
        found = Progress(num_events=len(self.stored), is_running=self.is_running)
        return dict.fromkeys(response_ids, found)

    async def news(self, positions: Mapping[str, int]) -> dict[str, list[StoredEvent]]:
        return {
            response_id: [each for each in self.stored if each.number > position]
            for response_id, position in positions.items()
        }


async def numbers_after(after: int) -> list[int]:
    """Numbers of the events that a reader gets while the response ends."""
    rows: Any = Rows()
    feed = Feed(rows)

    async def read() -> list[int]:
        batches = feed.follow(RESPONSE, after=after)
        return [event.number async for events in batches for event in events]

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)  # the reader waits for news
    await feed.poll()
    await asyncio.sleep(0)  # it has read the store again
    rows.end()
    await feed.poll()
    async with asyncio.timeout(10.0):
        return await reading


async def test_a_reader_gets_the_events_to_the_end():
    assert await numbers_after(-1) == [0, 1, 2]
    assert await numbers_after(1) == [2]


async def test_a_reader_that_asks_for_events_after_the_end_does_not_wait_for_them():
    assert await numbers_after(10) == []
