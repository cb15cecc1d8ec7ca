"""Times for which instances were idle beside waiting work, from the leader's counters."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import aiohttp
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from shared.contracts.base import Seconds

IDLE_METRIC = "headway_instance_idle_beside_work_seconds_total"
KEPT_METRIC = "headway_instance_kept_seconds_total"
PERIOD_S: Seconds = 1.0
"""Time between two looks at the counters."""

Samples = list[Mapping[str, float]]
"""Seconds of each instance, at each look."""


def longest_s(samples: Sequence[Mapping[str, float]]) -> Seconds:
    """Longest time in a row for which the seconds of one instance grew at each look."""
    return max(_streaks(samples), default=0.0)


def of_instances(families: Iterable[Metric], metric: str) -> dict[str, float]:
    """Instance -> value of one of the leader's metrics."""
    return {
        sample.labels["instance"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == metric
    }


async def watch(look: Callable[[], Mapping[str, float]], samples: Samples) -> None:
    """Add a look to *samples* each second, until cancelled."""
    while True:
        samples.append(look())
        await asyncio.sleep(PERIOD_S)


@contextlib.asynccontextmanager
async def idle_times_of(url: str) -> AsyncIterator[Samples]:
    """
    Context that looks at the metrics which a leader's process exports at *url*.

    Raises:
        aiohttp.ClientError: The metrics could not be read.
    """
    samples: Samples = []

    async def looking() -> None:
        async with aiohttp.ClientSession() as http:
            while True:
                async with http.get(url) as answer:
                    families = text_string_to_metric_families(await answer.text())
                samples.append(of_instances(families, IDLE_METRIC))
                await asyncio.sleep(PERIOD_S)

    task = asyncio.create_task(looking(), name="idle times")
    try:
        yield samples
        if task.done():  # it has failed, so that the times are not known
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _streaks(samples: Sequence[Mapping[str, float]]) -> Iterator[Seconds]:
    for instance in {name for sample in samples for name in sample}:
        streak_s = 0.0
        for before, after in pairwise(samples):
            grown_s = after.get(instance, 0.0) - before.get(instance, 0.0)
            streak_s = streak_s + grown_s if grown_s > 0 else 0.0
            yield streak_s
