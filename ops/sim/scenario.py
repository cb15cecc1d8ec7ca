"""Input of one simulation: traffic, engine, replicas."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ops.sim.arrivals import gamma, square_wave
from ops.sim.cluster import Outcome, Pool, simulate
from ops.sim.lengths import MIXES
from ops.sim.limits import EngineLimits
from ops.sim.policies import policy_factory
from ops.sim.profiles import NamedProfile
from ops.sim.pulling import PullOptions
from ops.sim.request import Arrival
from ops.sim.summary import violation_share
from ops.sim.workload import CLASSES, Trace, TrafficClass, build, resampled, synthetic
from shared.contracts.base import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Load that alternates between two rates."""

    low_rps: float
    high_rps: float
    half_period_s: Seconds = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All parameters of a simulation; equal scenarios give equal results."""

    profile: NamedProfile
    policy: str = "adaptive"
    replicas: int = 1
    silo: tuple[tuple[str, str, int], ...] = ()
    """Class, policy and number of replicas of each silo; empty: all classes share the replicas."""
    pull: PullOptions | None = None
    """Options of pulls from shared lanes; None: round robin."""
    rate_rps: float = 3.0
    duration_s: Seconds = 3600.0
    lengths: str = "code"
    """Name of a mix of lengths in `ops.sim.lengths.MIXES`; ignored if there is a trace."""
    trace: Trace | None = None
    trace_times: bool = False
    """True: requests arrive at the trace's times instead of at `rate_rps`."""
    variation: float = 1.0
    """Coefficient of variation of the gaps between arrivals; 1 is Poisson."""
    wave: Wave | None = None
    classes: tuple[TrafficClass, ...] = CLASSES
    low_share: float = 0.0
    prefill_only: bool = False
    drain: bool = False
    kv_capacity_tokens: int | None = None
    seed: int = 0

    @property
    def limits(self) -> EngineLimits:
        """Limits of every replica."""
        return EngineLimits(
            kv_capacity_tokens=self.kv_capacity_tokens or self.profile.kv_capacity_tokens,
            prefill_only=self.prefill_only,
        )

    def workload(self) -> list[Arrival]:
        """The arrivals of the scenario, determined by the seed."""
        random = np.random.default_rng(self.seed)
        times = self._times(random)
        if self.trace is not None and self.trace_times:
            return build(
                random,
                arrived_at=times,
                prompts=self.trace.prompts[: len(times)],
                outputs=self.trace.outputs[: len(times)],
                classes=self.classes,
                low_share=self.low_share,
            )
        if self.trace is not None:
            return resampled(
                random,
                self.trace,
                arrived_at=times,
                classes=self.classes,
                low_share=self.low_share,
            )
        return synthetic(
            random,
            arrived_at=times,
            lengths=MIXES[self.lengths],
            classes=self.classes,
            low_share=self.low_share,
        )

    def run(self) -> Outcome:
        """Run the simulation of the scenario."""
        return simulate(
            self.workload(),
            self._pools(),
            latency=self.profile.latency,
            limits=self.limits,
            drain=self.drain,
        )

    def violations_at(self) -> Callable[[float], float]:
        """Share of violations as a function of the request rate."""
        return lambda rate_rps: violation_share(replace(self, rate_rps=rate_rps).run().requests)

    def violations_with(self) -> Callable[[int], float]:
        """Share of violations as a function of the number of replicas."""
        return lambda replicas: violation_share(replace(self, replicas=replicas).run().requests)

    def _times(self, random: np.random.Generator) -> list[float]:
        if self.trace is not None and self.trace_times:
            return [at for at in self.trace.arrived_at if at < self.duration_s]
        if self.wave is not None:
            return square_wave(
                random,
                low_rps=self.wave.low_rps,
                high_rps=self.wave.high_rps,
                half_period_s=self.wave.half_period_s,
                duration_s=self.duration_s,
            )
        return gamma(
            random,
            rate_rps=self.rate_rps,
            duration_s=self.duration_s,
            variation=self.variation,
        )

    def _pools(self) -> list[Pool]:
        if self.silo:
            return [
                Pool(num_replicas=count, factory=policy_factory(policy), classes=frozenset({name}))
                for name, policy, count in self.silo
            ]
        factory = policy_factory(self.policy)
        return [Pool(num_replicas=self.replicas, factory=factory, pull=self.pull)]
