"""Synthetic prefill times, for tests of their predictors."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.prediction.prefill.features import InstanceFeatures, RequestFeatures, feature_matrix

_CHUNK_TOKENS = 512
_ITERATION_S = 0.008
_TOKEN_S = 6e-5
_PAIR_S = 4e-9
_DECODE_S = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Mix of requests, with shares 0..1."""

    long_share: float = 0.25
    reuse_share: float = 0.6
    """Share of requests with a cached prefix."""
    budget_tokens: int = 512
    """Typical generation budget; with a longer budget, more sequences run together."""


NOMINAL = Workload()
MORE_LONG = Workload(long_share=0.6)
LOW_REUSE = Workload(reuse_share=0.1)
LARGE_BUDGET = Workload(budget_tokens=2048)


@dataclass(frozen=True, slots=True)
class Request:
    """A request, the instance that served it, and its prefill time."""

    request: RequestFeatures
    instance: InstanceFeatures
    prefill_s: float

    @property
    def features(self) -> NDArray[np.float64]:
        return feature_matrix(self.request, [self.instance])


def requests_of(workload: Workload, count: int, *, seed: int) -> list[Request]:
    """Requests of a workload; deterministic by seed."""
    random = np.random.default_rng(seed)
    return [_request(workload, random) for _ in range(count)]


def matrix_of(requests: list[Request]) -> NDArray[np.float64]:
    return np.concatenate([each.features for each in requests])


def times_of(requests: list[Request]) -> NDArray[np.float64]:
    return np.array([each.prefill_s for each in requests])


def _request(workload: Workload, random: np.random.Generator) -> Request:
    long = random.random() < workload.long_share
    prompt = int(np.clip(random.lognormal(8.3 if long else 5.8, 0.6), 16, 32_000))
    reused = random.random() < workload.reuse_share
    cached = int(prompt * random.uniform(0.1, 0.95)) // 16 * 16 if reused else 0
    budget = int(random.integers(workload.budget_tokens // 4, workload.budget_tokens * 2))
    request = RequestFeatures(
        prompt_tokens=prompt,
        max_tokens=budget,
        temperature=float(random.choice([0.0, 0.7, 1.0])),
        is_interactive=not long,
        is_streaming=not long,
    )
    running = int(random.poisson(8 * workload.budget_tokens / 512))
    instance = InstanceFeatures(
        cached_tokens=cached,
        running=running,
        prefill_backlog_tokens=int(random.exponential(3000)) if random.random() < 0.6 else 0,
        kv_utilization=min(1.0, running / 48 + 0.2 * random.random()),
    )
    return Request(request, instance, _prefill_s(request, instance, random))


def _prefill_s(
    request: RequestFeatures, instance: InstanceFeatures, random: np.random.Generator
) -> float:
    """
    Time of a request's chunks beside other work, with stale caches, noise and rare stalls.
    """
    kept = instance.cached_tokens * (random.random() > 0.05)
    tokens = max(1.0, request.prompt_tokens - kept)
    others = random.uniform(0.0, 0.5) * min(float(instance.prefill_backlog_tokens), tokens)
    iterations = np.ceil((tokens + others) / _CHUNK_TOKENS)
    busy_s = iterations * (_ITERATION_S + _DECODE_S * instance.running)
    busy_s += (tokens + others) * _TOKEN_S + tokens * (kept + tokens / 2) * _PAIR_S
    stall = 2.5 if random.random() < 0.03 else 1.0
    return float(busy_s * random.lognormal(0.0, 0.15) * stall)
