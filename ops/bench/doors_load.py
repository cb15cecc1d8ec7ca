"""Load of the servers of `ops.bench doors` over time, by their own counts."""

import asyncio
import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from ops.bench.doors_processes import RunningServer
from ops.bench.doors_server import Counts
from shared.contracts.base import Seconds

PERIOD_S = 0.5
_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cached_tokens",
    "vllm:generation_tokens_total": "answer_tokens",
}
"""Metric of a real `vllm serve` -> field of `Counts`."""


@dataclass(slots=True)
class ServerCounts:
    """
    Follows the counts of all servers.

    A server that is killed takes its counts with it: what it had counted at the last look before is
    kept.
    """

    http: aiohttp.ClientSession
    servers: Sequence[RunningServer]
    spreads: list[int] = field(default_factory=list)
    """Largest minus smallest number of running requests, at each look."""
    _last: dict[str, Counts] = field(default_factory=dict)
    _before: list[Counts] = field(default_factory=list)
    """Last counts of servers that were started again."""

    async def follow(self, period_s: Seconds = PERIOD_S) -> None:
        """Look at the servers until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(period_s)

    async def look(self) -> None:
        """Look at all servers once."""
        found = await asyncio.gather(*(self._counts(server) for server in self.servers))
        for server, counts in zip(self.servers, found, strict=True):
            if counts is not None:
                self.seen(server.url, counts)
        running = [counts.running for counts in found if counts is not None]
        if len(running) == len(self.servers):
            self.spreads.append(max(running) - min(running))

    def seen(self, url: str, counts: Counts) -> None:
        """Record the counts of one server."""
        last = self._last.get(url)
        if last is not None and last.prompt_tokens > counts.prompt_tokens:
            self._before.append(last)
        self._last[url] = counts

    def total(self) -> Counts:
        """Sums over all servers since their first starts."""
        every = [*self._before, *self._last.values()]
        names = Counts.__struct_fields__
        return Counts(**{name: sum(getattr(each, name) for each in every) for name in names})

    @property
    def all_used(self) -> bool:
        """True if every server has begun a request."""
        used = [url for url, counts in self._last.items() if counts.prompt_tokens]
        return len(used) == len(self.servers)

    @property
    def mean_spread(self) -> float | None:
        """Mean of the spreads; None if no look saw all servers."""
        return statistics.fmean(self.spreads) if self.spreads else None

    async def _counts(self, server: RunningServer) -> Counts | None:
        path = "/metrics" if server.process is None else "/count"
        limit = aiohttp.ClientTimeout(total=2.0)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self.http.get(server.url + path, timeout=limit) as response:
                text = await response.read()
                if server.process is None:
                    return counts_of(text.decode())
                return msgspec.json.decode(text, type=Counts)
        return None


def counts_of(metrics: str) -> Counts:
    """The counts in the text of vLLM's metrics."""
    values: dict[str, int] = {}
    for line in metrics.splitlines():
        name, _, rest = line.partition("{")
        if name in _NAMES:
            values[_NAMES[name]] = values.get(_NAMES[name], 0) + int(float(rest.split()[-1]))
    return Counts(**values)
