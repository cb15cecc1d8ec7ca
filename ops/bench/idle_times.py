"""Times for which instances were idle beside waiting work, from the leader's counters."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import aiohttp
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from shared.contracts.base import Seconds

IDLE_METRIC = "headway_instance_idle_beside_work_seconds_total"
SWAP_METRIC = "headway_instance_swap_seconds"
KEPT_METRIC = "headway_instance_kept_seconds_total"
PERIOD_S: Seconds = 1.0
"""Time between two looks at the counters."""


@dataclass(frozen=True, slots=True)
class Look:
    """Metrics of the instances at one time, by instance."""

    idle_s: Mapping[str, Seconds]
    """Total time for which the instance was idle beside waiting work."""
    swap_s: Mapping[str, Seconds]
    """Shortest time to activate another model there."""


def look_at(families: Iterable[Metric]) -> Look:
    """Read the leader's metrics."""
    known = list(families)
    return Look(of_instances(known, IDLE_METRIC), of_instances(known, SWAP_METRIC))


def longest_swaps(looks: Sequence[Look]) -> float:
    """
    Longest time in a row for which one instance was idle beside work at each look, in times of a
    swap there when it began.
    """
    return max(_streaks(looks), default=0.0)


def of_instances(families: Iterable[Metric], metric: str) -> dict[str, float]:
    """Instance -> value of one of the leader's metrics."""
    return {
        sample.labels["instance"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == metric
    }


async def watch(look: Callable[[], Look], looks: list[Look]) -> None:
    """Add a look to *looks* each second, until cancelled."""
    while True:
        looks.append(look())
        await asyncio.sleep(PERIOD_S)


@contextlib.asynccontextmanager
async def idle_times_of(url: str) -> AsyncIterator[list[Look]]:
    """
    Context that looks at the metrics which a leader's process exports at *url*.

    Raises:
        aiohttp.ClientError: The metrics could not be read.
    """
    looks: list[Look] = []

    async def looking() -> None:
        async with aiohttp.ClientSession() as http:
            while True:
                async with http.get(url) as answer:
                    families = text_string_to_metric_families(await answer.text())
                looks.append(look_at(families))
                await asyncio.sleep(PERIOD_S)

    task = asyncio.create_task(looking(), name="idle times")
    try:
        yield looks
        if task.done():  # it has failed, so that the times are not known
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _streaks(looks: Sequence[Look]) -> Iterator[float]:
    for instance in {name for look in looks for name in look.idle_s}:
        streak_s, swap_s = 0.0, math.inf
        for before, after in pairwise(looks):
            grown_s = after.idle_s.get(instance, 0.0) - before.idle_s.get(instance, 0.0)
            if streak_s == 0:
                swap_s = before.swap_s.get(instance, math.inf)
            streak_s = streak_s + grown_s if grown_s > 0 else 0.0
            yield streak_s / swap_s
