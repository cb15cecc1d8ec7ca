"""QLM's workloads (§8): W_A with several models, W_B with one model, W_C with mega prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ops.sim.arrivals import gamma
from ops.sim.lengths import LengthMix, lognormal
from ops.sim.mesh.cluster import ModelArrival
from ops.sim.mesh.kinds import LLAMA_70B, MISTRAL_7B, VICUNA_13B, ModelKind
from ops.sim.request import Arrival
from shared.contracts.base import ModelName, Seconds
from shared.contracts.qos import Importance, Slo

SHAREGPT = LengthMix(
    name="sharegpt-vllm",
    prompt=lognormal(80, 370, largest=2048),
    output=lognormal(240, 700, largest=2048),
)
"""
Lengths of QLM's ShareGPT, with means of 161 and 338 tokens (vLLM, SOSP 2023, §6.1).

Decided: the standard deviations are assumed.
"""
MEGA_PROMPT, MEGA_OUTPUT = (3000, 4000), (512, 1024)
"""Ranges of the tokens of mega prompts and their answers, uniformly distributed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshClass:
    """A class of requests with its TTLT target."""

    name: str
    ttlt_s: Seconds
    share: float


INTERACTIVE_S, BATCH_1_S, BATCH_2_S = 20.0, 60.0, 3600.0
"""
TTLT targets of the classes.

Decided: QLM states below 30 s for latency-sensitive services and several minutes for batch jobs,
but a minute and an hour in its production figures.
"""


def classes(interactive: float) -> tuple[MeshClass, ...]:
    """
    Classes of requests: latency-sensitive with share *interactive*, and batch classes with equal
    shares.
    """
    rest = (1 - interactive) / 2
    return (
        MeshClass(name="interactive", ttlt_s=INTERACTIVE_S, share=interactive),
        MeshClass(name="batch-1", ttlt_s=BATCH_1_S, share=rest),
        MeshClass(name="batch-2", ttlt_s=BATCH_2_S, share=rest),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshTraffic:
    """Parameters of arrivals for several models."""

    models: dict[ModelName, float]
    """Share of the arrivals of each model."""
    rate_rps: float
    """Arrival rate in requests per second; 0: only the initial queue."""
    duration_s: Seconds
    variation: float = 2.0
    """Coefficient of variation of the gaps between arrivals; above 1, arrivals are bursty."""
    interactive: float = 0.25
    mega: float = 0.0
    """Share of requests that have a mega prompt."""
    slo_scale: float = 1.0
    queue: int = 0
    """Number of requests of the last class that wait at the start."""
    seed: int = 0

    def arrivals(self) -> list[ModelArrival]:
        """Arrivals in order of time; equal seeds give equal arrivals."""
        random = np.random.default_rng(self.seed)
        times = [0.0] * self.queue
        if self.rate_rps:
            times += gamma(
                random,
                rate_rps=self.rate_rps,
                duration_s=self.duration_s,
                variation=self.variation,
            )
        count = len(times)
        names, kinds = list(self.models), classes(self.interactive)
        model = random.choice(len(names), size=count, p=list(self.models.values()))
        kind = random.choice(len(kinds), size=count, p=[each.share for each in kinds])
        kind[: self.queue] = len(kinds) - 1
        prompts, outputs = self._lengths(random, count)
        return [
            ModelArrival(
                model=names[model[n]],
                arrival=Arrival(
                    arrived_at=times[n],
                    prompt_tokens=prompts[n],
                    output_tokens=outputs[n],
                    class_name=kinds[kind[n]].name,
                    slo=Slo(ttlt_s=self.slo_scale * kinds[kind[n]].ttlt_s),
                    importance=Importance.HIGH,
                ),
            )
            for n in range(count)
        ]

    def _lengths(self, random: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        prompts = SHAREGPT.prompt.draw(random, count)
        outputs = SHAREGPT.output.draw(random, count)
        mega = random.random(count) < self.mega
        for n in np.flatnonzero(mega).tolist():
            prompts[n] = int(random.integers(*MEGA_PROMPT))
            outputs[n] = int(random.integers(*MEGA_OUTPUT))
        return prompts, outputs


def tailed(num_frequent: int, num_tail: int, tail: float) -> tuple[list[float], list[float]]:
    """
    Share of arrivals of each frequent model, and of each rarely used model.

    Args:
        num_frequent: Number of frequent models, with equal shares.
        num_tail: Number of rarely used models, with equal shares.
        tail: Ratio of arrivals for all tail models to arrivals for all frequent models, 0..1.
    """
    total = num_frequent + num_frequent * tail
    frequent = [1 / total] * num_frequent
    return frequent, [num_frequent * tail / total / num_tail] * num_tail


_SIZES: Sequence[ModelKind] = (MISTRAL_7B, VICUNA_13B, LLAMA_70B)


def many_models(
    num_frequent: int, num_tail: int, tail: float, sizes: Sequence[ModelKind] = _SIZES
) -> tuple[dict[ModelName, ModelKind], dict[ModelName, float]]:
    """Kinds of models, whose sizes are *sizes* in turn, and the models' shares of the arrivals."""
    frequent, rare = tailed(num_frequent, num_tail, tail)
    kinds: dict[ModelName, ModelKind] = {}
    shares: dict[ModelName, float] = {}
    for prefix, given in (("model", frequent), ("tail", rare)):
        for number, share in enumerate(given):
            kind = sizes[number % len(sizes)]
            name = ModelName(f"{prefix}-{number}-{kind.name}")
            kinds[name], shares[name] = kind, share
    return kinds, shares
