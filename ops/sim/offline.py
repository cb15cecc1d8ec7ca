"""Online traffic beside an offline backlog (ConServe §6), and the outcomes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ops.sim.arrivals import gamma
from ops.sim.engine import SimulatedReplica
from ops.sim.lengths import LengthModel
from ops.sim.request import Arrival, SimRequest
from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.qos import Slo

_P99_Z = 2.3263478740408408


def by_mean(mean: float, p99: float) -> LengthModel:
    """Lognormal lengths with the given mean and 99th percentile, cut at the 99.9th percentile."""
    # mean = exp(m + s²/2) and p99 = exp(m + z·s); the smaller of the two roots.
    sigma = _P99_Z - math.sqrt(_P99_Z**2 - 2 * math.log(p99 / mean))
    z = np.linspace(-3.1, 3.1, 125)
    shares = [0.5 * (1 + math.erf(v / math.sqrt(2))) for v in z]
    tokens = [mean * math.exp(sigma * v - sigma**2 / 2) for v in z]
    return LengthModel(shares=(0.0, *shares[1:-1], 1.0), tokens=tuple(tokens))


DATASETS: dict[str, tuple[LengthModel, LengthModel]] = {
    "DuReader": (by_mean(21776, 29306), by_mean(166, 754)),
    "MultiNews": (by_mean(6916, 12084), by_mean(394, 788)),
    "VCSUM": (by_mean(18803, 32768), by_mean(337, 510)),
}
"""
Lengths of ConServe's table 1: lognormal with the table's means and 99th percentiles.

The table's data sets are not used.
"""
BURST_GPT = (by_mean(2747, 3446), by_mean(267, 481))
"""Lengths of ConServe's online traffic (BurstGPT), by mean and 99th percentile."""
_BACKLOG = 64
"""
Number of offline requests that always wait; more requests than an engine starts in an iteration.
"""


class TimedRequest(SimRequest):
    """A request that records the gaps between its tokens."""

    __slots__ = ("gaps_s",)

    def __init__(self, request_id: RequestId, arrival: Arrival) -> None:
        super().__init__(request_id, arrival)
        self.gaps_s: list[Seconds] = []

    def generate(self, now: UnixTime) -> None:
        if self.first_token_at is not None:
            self.gaps_s.append(now - self.last_token_at)
        super().generate(now)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoServing:
    """
    Open-loop online traffic, and a backlog of offline requests that never becomes empty.

    Offline requests are drawn from *datasets* with equal probability; without datasets, all
    traffic is online.
    """

    rate_rps: float = 2.0
    variation: float = 0.5
    prompt: int | LengthModel = 4096
    output: int | LengthModel = 256
    slo: Slo
    datasets: tuple[str, ...] = tuple(DATASETS)
    duration_s: Seconds = 300.0
    seed: int = 0

    def online(self) -> list[TimedRequest]:
        """Online requests of the traffic in order of arrival."""
        random = np.random.default_rng((self.seed, 1))
        times = gamma(
            random, rate_rps=self.rate_rps, duration_s=self.duration_s, variation=self.variation
        )
        prompts = _drawn(self.prompt, random, len(times))
        outputs = _drawn(self.output, random, len(times))
        return [
            TimedRequest(RequestId(f"online-{n}"), _arrival(at, prompt, output, self.slo))
            for n, (at, prompt, output) in enumerate(zip(times, prompts, outputs, strict=True))
        ]

    def offline(self) -> list[SimRequest]:
        """
        Offline requests that wait from the start; more requests than an engine can serve in
        `duration_s`.
        """
        random = np.random.default_rng((self.seed, 2))
        if not self.datasets:
            return []
        count = _BACKLOG + int(self.duration_s * _MOST_OFFLINE_RPS)
        chosen = random.integers(0, len(self.datasets), count)
        drawn = {
            name: tuple(model.draw(random, count) for model in DATASETS[name])
            for name in self.datasets
        }
        return [
            SimRequest(
                RequestId(f"offline-{n}"),
                _arrival(0.0, drawn[name][0][n], drawn[name][1][n], Slo()),
            )
            for n, name in enumerate(self.datasets[int(index)] for index in chosen)
        ]

    def run(self, replica: SimulatedReplica) -> "Harvest":
        """
        Serve the traffic on a new *replica* for `duration_s`.

        Raises:
            RuntimeError: The offline backlog became empty.
        """
        online, offline = self.online(), self.offline()
        end_s = replica.run([*offline, *online], until=self.duration_s)
        if offline and sum(r.finished_at is None for r in offline) < _BACKLOG // 2:
            raise RuntimeError("less than half of the offline backlog is left at the end")
        return Harvest(online=online, offline=offline, replica=replica, end_s=end_s)


_MOST_OFFLINE_RPS = 4.0
"""Number of offline requests per second, above the capacity of every simulated engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Harvest:
    """Outcomes of the online and offline requests of a simulation."""

    online: Sequence[TimedRequest]
    offline: Sequence[SimRequest]
    replica: SimulatedReplica = field(repr=False)
    end_s: Seconds

    def ttft_s(self) -> list[Seconds]:
        """TTFT of each online request; without a first token, its waiting time until the end."""
        return [
            (self.end_s if r.first_token_at is None else r.first_token_at) - r.arrival.arrived_at
            for r in self.online
            if r.first_token_at is not None or r.arrival.arrived_at < self.end_s - 1.0
        ]

    def tbt_s(self) -> list[Seconds]:
        """All gaps between tokens of online requests."""
        return [gap_s for r in self.online for gap_s in r.gaps_s]

    def figures(self) -> dict[str, Any]:
        """
        Latencies, and offline throughput in tokens per second.

        `offline_tps` counts each prompt or answer token once; `wasted_tps` counts tokens that were
        computed and then lost by preemption.
        """
        ttft_s, tbt_s = np.array(self.ttft_s()), np.array(self.tbt_s())
        ttft_target_s = self.online[0].arrival.slo.ttft_s or math.inf
        tbt_target_s = self.online[0].arrival.slo.tbt_s or math.inf
        totals = self.replica.totals
        return {
            "ttft_p50_ms": 1e3 * float(np.quantile(ttft_s, 0.5)),
            "ttft_p99_ms": 1e3 * float(np.quantile(ttft_s, 0.99)),
            "ttft_max_ms": 1e3 * float(ttft_s.max()),
            "tbt_p50_ms": 1e3 * float(np.quantile(tbt_s, 0.5)),
            "tbt_p99_ms": 1e3 * float(np.quantile(tbt_s, 0.99)),
            "ttft_attainment": float(np.mean(ttft_s <= ttft_target_s)),
            "tbt_attainment": float(np.mean(tbt_s <= tbt_target_s)),
            "offline_tps": sum(map(self.replica.kept_tokens, self.offline)) / self.end_s,
            "wasted_tps": totals.wasted_tokens / self.end_s,
            "preempted": totals.num_preempted,
            "busy": totals.busy_s / self.end_s,
        }


def _drawn(length: int | LengthModel, random: np.random.Generator, count: int) -> list[int]:
    return [length] * count if isinstance(length, int) else length.draw(random, count)


def _arrival(at: float, prompt: int, output: int, slo: Slo) -> Arrival:
    name = "online" if slo.ttft_s is not None else "offline"
    return Arrival(
        arrived_at=at, prompt_tokens=prompt, output_tokens=output, class_name=name, slo=slo
    )
