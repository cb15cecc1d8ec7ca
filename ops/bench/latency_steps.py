"""Simulated iterations that the latency benchmark learns from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.policies import policy_factory
from ops.sim.profiles import NamedProfile
from ops.sim.request import SimRequest
from ops.sim.routing.engine import NOISE
from ops.sim.scenario import Scenario
from ops.sim.work import Work
from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.telemetry import EngineIteration

RATES_RPS = {"A100-80GB": 3.0, "H100-80GB": 6.0}
"""Approximate capacity of one replica of each device for the conversation mix, in requests/s."""


@dataclass(frozen=True, slots=True)
class Step:
    """One simulated iteration."""

    iteration: EngineIteration
    """The iteration as telemetry reports it, with noise."""
    exact_s: Seconds
    """Exact duration of the iteration from the latency profile."""
    chunk: tuple[int, int] | None
    """
    Tokens of the iteration's chunk and computed tokens before it; None unless the iteration has one
    prefill.
    """


class NoisyReplica(SimulatedReplica):
    """The simulated engine with the noise of `ops.sim.routing`; records its iterations."""

    def __init__(self, profile: NamedProfile, policy: str, random: np.random.Generator) -> None:
        super().__init__(
            policy_factory(policy)(profile.latency),
            profile.latency,
            EngineLimits(kv_capacity_tokens=profile.kv_capacity_tokens),
        )
        self._random = random
        self.steps: list[Step] = []

    def _compute(self, now: UnixTime, work: Work) -> tuple[Seconds, Work]:
        exact_s, work = super()._compute(now, work)
        duration_s = exact_s * float(np.exp(self._random.normal(0.0, NOISE)))
        if work.tokens:
            chunks = [(count, run.num_computed_tokens) for run, count in work.prefills]
            iteration = EngineIteration(
                compute_tokens=work.tokens,
                context_tokens=work.context_tokens,
                num_decodes=len(work.decodes),
                duration_s=duration_s,
                prefill_pairs=work.pairs,
            )
            self.steps.append(Step(iteration, exact_s, chunks[0] if len(chunks) == 1 else None))
        return duration_s, work


def simulated_steps(
    profile: NamedProfile, device: str, *, seed: int, duration_s: Seconds
) -> list[Step]:
    """
    Iterations of one replica with the default policy, the conversation mix and QoServe's classes.
    """
    scenario = Scenario(
        profile=profile,
        policy="qoserve",
        rate_rps=RATES_RPS[device],
        duration_s=duration_s,
        lengths="conversation",
        seed=seed,
    )
    replica = NoisyReplica(profile, scenario.policy, np.random.default_rng(seed + 1))
    requests = [
        SimRequest(RequestId(str(number)), arrival)
        for number, arrival in enumerate(scenario.workload())
    ]
    replica.run(requests, until=duration_s)
    return replica.steps


def disturbed(
    iterations: Sequence[EngineIteration], *, share: float, seed: int
) -> list[EngineIteration]:
    """Copy of the iterations in which a *share* takes 2 to 20 times as long."""
    random = np.random.default_rng(seed)
    factors = np.where(
        random.random(len(iterations)) < share, random.uniform(2, 20, len(iterations)), 1.0
    )
    return [
        structs.replace(each, duration_s=each.duration_s * float(factor))
        for each, factor in zip(iterations, factors, strict=True)
    ]
