"""Rounds of the bench of attached servers: one arm serves one load beside batch requests."""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ops.bench.attach_arms import Arm, cpu_s
from ops.bench.cores import EngineCores
from ops.bench.engine_load import Planned, planned_load
from ops.bench.progress import say
from ops.bench.rate_search import RateSearch
from ops.sim.attached.fronts import BATCH, INTERACTIVE
from ops.sim.attached.outcomes import Outcome, is_missed
from shared.contracts.base import Seconds
from shared.contracts.qos import Slo

OURS, OWN = "headway", "headway, own engines"
ORACLE = "oracle"
"""
Least loaded, with the interactive requests alone on the servers: no policy that serves the other
requests as well can be expected to miss fewer targets.
"""
NUM_BATCH = 24
"""Number of batch requests that are always open; fewer than the servers can run."""
BATCH_TOKENS, BATCH_PROMPT = 64, 96
TOLERANCE = 0.05
FIRST_RPS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the benchmark's measurements."""

    interactive: int
    """Expected number of interactive requests of a load that is not too long."""
    most_load_s: Seconds
    patience_s: Seconds
    alone: int
    shares: tuple[float, ...]
    seeds: int
    probes: int
    pairs: int
    """Number of pairs of rounds for each load."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with targets, which arrive within a duration."""

    requests: Sequence[Planned]
    duration_s: Seconds


@dataclass(slots=True)
class Round:
    """What one arm has done under one load."""

    late: Sequence[bool]
    """True for each interactive request with a missed target, in order of the load."""
    late_q2: Sequence[bool]
    """The same of the requests with a limit for the whole answer."""
    batch_per_cpu_s: float
    """Tokens of batch requests per CPU second of the servers."""
    mesh_cores: float = 0.0
    """CPU time of the mesh per second."""

    @property
    def missed(self) -> float:
        """Share of interactive requests with a missed target."""
        return _share(self.late)

    @property
    def missed_q2(self) -> float:
        """Share of requests with a missed limit for the whole answer."""
        return _share(self.late_q2)

    def missed_of(self, served: Sequence[bool]) -> float:
        """Share with a missed target among the interactive requests for which *served* is true."""
        return _share([late for late, counts in zip(self.late, served, strict=True) if counts])


def _share(found: Sequence[bool]) -> float:
    return sum(found) / max(1, len(found))


@dataclass(slots=True)
class Bench:
    """The running servers and arms."""

    arms: Mapping[str, Arm]
    slos: Mapping[str, Slo]
    server_pids: Mapping[str, Sequence[int]]
    """Arm -> processes whose CPU time counts as the engines'."""
    mesh_pids: Mapping[str, Sequence[int]]
    cores: EngineCores
    sizes: Sizes
    seed: int
    search: RateSearch = field(default_factory=lambda: RateSearch(first_rps=FIRST_RPS))
    """Trials with one baseline; the share is the mean over the seeds."""
    rates: dict[float, float] = field(default_factory=dict)

    async def serve(self, name: str, load: Load) -> Round:
        """Serve *load* with one arm, beside batch requests except for the oracle."""
        arm, requests = self.arms[name], load.requests
        engines, mesh = self.server_pids[name], self.mesh_pids.get(name, ())
        batch: list[Outcome] = []
        num_batch = NUM_BATCH
        if name == ORACLE:
            num_batch = 0
            requests = [each for each in requests if each.class_name == INTERACTIVE]
        keeping = asyncio.create_task(self._keep_batch(arm, batch, num_batch))
        await asyncio.sleep(1.0)  # batch requests run when the load begins
        begun, begun_at = time.perf_counter(), time.time()
        used_s, mesh_s = cpu_s(engines), cpu_s(mesh)
        computed = sum(each.num_tokens for each in batch)
        served: list[tuple[Planned, Outcome]] = []
        tasks = []
        for each in requests:
            await asyncio.sleep(max(0.0, begun + each.at_s - time.perf_counter()))
            outcome = Outcome(begun_at + each.at_s)
            served.append((each, outcome))
            slo = self.slos[each.class_name]
            ask = arm.ask(each.prompt, each.output_tokens, each.class_name, slo, outcome)
            tasks.append(asyncio.create_task(ask))
        await asyncio.sleep(max(0.0, begun + load.duration_s - time.perf_counter()))
        elapsed_s = time.perf_counter() - begun
        tokens = sum(each.num_tokens for each in batch) - computed
        engine_s, mesh_used_s = cpu_s(engines) - used_s, cpu_s(mesh) - mesh_s
        await asyncio.wait(tasks, timeout=self.sizes.patience_s) if tasks else None
        for task in (*tasks, keeping):
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(keeping, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        return Round(
            late=self._late(served, INTERACTIVE),
            late_q2=self._late(served, "Q2"),
            batch_per_cpu_s=tokens / max(1e-9, engine_s),
            mesh_cores=mesh_used_s / elapsed_s,
        )

    def load(self, number: int, rate_rps: float) -> Load:
        """The requests with targets of one load, half of them interactive."""
        duration_s = min(self.sizes.most_load_s, 2 * self.sizes.interactive / rate_rps)
        # Two of three classes have targets.
        planned = planned_load(
            seed=self.seed + number, rate_rps=1.5 * rate_rps, duration_s=duration_s
        )
        return Load([each for each in planned if each.class_name in self.slos], duration_s)

    async def rate(self, baseline: str, share: float) -> float:
        """Rate at which *baseline* misses *share* of the interactive targets, over all seeds."""
        for _ in range(self.sizes.probes):
            rate_rps = self.search.next_rps(share)
            loads = [self.load(number, rate_rps) for number in range(self.sizes.seeds)]
            missed = statistics.mean([(await self.serve(baseline, load)).missed for load in loads])
            self.search.missed[rate_rps] = missed
            say(f"{baseline} at {rate_rps:.1f}/s misses {missed:.0%}, wanted {share:.0%}")
            if abs(missed - share) <= TOLERANCE:
                break
        return self.search.nearest_rps(share)

    async def _keep_batch(self, arm: Arm, outcomes: list[Outcome], num_open: int) -> None:
        """Keep *num_open* batch requests open until cancelled."""
        random = np.random.default_rng(self.seed)

        async def one() -> None:
            while True:
                prompt = tuple(random.integers(10, 500, BATCH_PROMPT).tolist())
                outcome = Outcome(time.time())
                outcomes.append(outcome)
                await arm.ask(prompt, BATCH_TOKENS, BATCH, Slo(), outcome)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_open):
                group.create_task(one())

    def _late(self, served: Sequence[tuple[Planned, Outcome]], class_name: str) -> list[bool]:
        return [
            is_missed(outcome, self.slos[class_name])
            for planned, outcome in served
            if planned.class_name == class_name
        ]
