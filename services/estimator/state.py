"""State that the estimator has learnt, per (model, engine, device)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cachetools import FIFOCache

from services.estimator.alarms import InstanceWatch
from services.estimator.telemetry_adapters import (
    WAIT_LEVELS,
    ProfileKey,
    answer_of,
    began_once,
    judge_wait,
    with_pairs,
)
from services.estimator.trees.active_trees import TreesWatch
from services.estimator.trees.auto_fit import OwnFits
from services.estimator.trees.sample_store import SampleStore
from shared.contracts.base import ModelName, UnixTime
from shared.contracts.estimates import Profile
from shared.contracts.telemetry import IterationsObserved, ModelActivated, RequestObserved
from solver.prediction.alarms.alarm import AlarmOptions
from solver.prediction.calibration.moments import RunningMoments
from solver.prediction.calibration.running_calibration import RunningCalibration
from solver.prediction.latency.latency_model import OnlineLatencyFit
from solver.prediction.lengths.cached_shares import CachedShares
from solver.prediction.lengths.decode_lengths import POOLED_REQUESTS, DecodeLengths

MAX_INSTANCES = 10_000
"""Number of instances whose identities are kept; the oldest ones are dropped."""


class Learner:
    """
    Learns the profile of one (model, engine, device).

    Args:
        key: Model, engine and device.
        iteration_memory: Number of later iterations after which an iteration has weight 1/e.
        request_memory: Number of later requests after which a request has weight 1/e.
        lengths: Answer lengths of the model, over all engines and devices.
    """

    def __init__(
        self,
        key: ProfileKey,
        iteration_memory: float,
        request_memory: float,
        lengths: DecodeLengths,
    ) -> None:
        self.key = key
        self.lengths = lengths
        self.fit = OnlineLatencyFit(memory=iteration_memory)
        self.latency_calibration = RunningCalibration(memory=iteration_memory)
        self.wait_calibration = RunningCalibration(memory=request_memory, levels=WAIT_LEVELS)
        self.prefill_s = RunningMoments(memory=request_memory)
        self.cached = CachedShares()
        self.swap_s: dict[str, RunningMoments] = {}
        self.prior: Profile | None = None
        """
        Profile that an earlier run saved; used for estimates that this run has not learnt yet.
        """
        self.latest: Profile | None = None
        """The profile that was published last."""
        self.version = 0
        self.changed = True
        self._iteration_memory = iteration_memory
        self._busy_tokens = self._busy_s = 0.0

    def restore(self, profile: Profile) -> None:
        """Start from the profile that an earlier run of the estimator saved."""
        self.prior = profile
        self.version = max(self.version, profile.version)
        if profile.latency is not None:
            self.fit.believe(profile.latency)

    def on_iterations(self, observed: IterationsObserved) -> None:
        """Learn iteration times and throughput from an engine's iterations."""
        keep = math.exp(-len(observed.iterations) / self._iteration_memory)
        self._busy_tokens *= keep
        self._busy_s *= keep
        for iteration, pairs in with_pairs(observed):
            self.fit.observe(iteration, pairs)
            self._busy_tokens += iteration.compute_tokens
            self._busy_s += iteration.duration_s
        self.changed = True

    def judge_latency(self, multiples: Sequence[float], *, at: UnixTime) -> None:
        """
        Evaluate the latest profile with iteration times, given as multiples of their predictions.
        """
        for multiple in multiples:
            self.latency_calibration.observe(1 / multiple - 1, at=at)

    def on_request(self, observed: RequestObserved) -> None:
        """Learn answer lengths and prefill times from requests that ran without interruption."""
        if observed.outcome != "completed":
            return
        if (answer := answer_of(observed)) is not None:
            self.lengths.observe(observed.application, answer, at=observed.finished_at)
        if observed.evictions == 0:
            if began_once(observed):
                self.cached.observe(
                    observed.application,
                    prompt_tokens=observed.prompt_tokens,
                    cached_tokens=observed.cached_tokens,
                )
                self.prefill_s.observe(observed.first_token_at - observed.submitted_at)
            judge_wait(self.wait_calibration, observed)
        self.changed = True

    def on_activated(self, observed: ModelActivated) -> None:
        """Learn the duration of a model's activation."""
        moments = self.swap_s.setdefault(observed.source.value, RunningMoments(memory=10))
        moments.observe(observed.duration_s)
        self.changed = True

    def profile(self, now: UnixTime) -> Profile:
        """Create a new version of the profile with the current estimates."""
        self.version = max(self.version + 1, int(now * 1000))
        self.changed = False
        model, engine, device = self.key
        latency, errors = self.fit.fit() if self.fit.count else None, self.fit.errors
        prior = self.prior
        swap_s = dict(prior.swap_s) if prior else {}
        swap_s |= {
            source: value.mean
            for source, moments in self.swap_s.items()
            if (value := moments.value()) is not None
        }
        self.latest = Profile(
            model=ModelName(model),
            engine=engine,
            device=device,
            version=self.version,
            at=now,
            latency=latency or (prior.latency if prior else None),
            latency_error=errors.median if errors else None,
            latency_error_p95=errors.p95 if errors else None,
            latency_bias=errors.bias if errors else None,
            num_iterations=self.fit.count,
            token_rate_per_s=self._busy_tokens / self._busy_s
            if self._busy_s > 0
            else (prior.token_rate_per_s if prior else None),
            prefill_s=self.prefill_s.value() or (prior.prefill_s if prior else None),
            latency_calibration=self.latency_calibration.value(),
            wait_calibration=self.wait_calibration.value(),
            output_tokens=self.lengths.estimates(),
            cached_share=self.cached.shares() or (prior.cached_share if prior else {}),
            swap_s=swap_s,
        )
        return self.latest


@dataclass(slots=True, kw_only=True)
class EstimatorState:
    """Learners of all profiles, one for each (model, engine, device)."""

    iteration_memory: float
    request_memory: float
    max_applications: int
    pooled_requests: float = POOLED_REQUESTS
    learners: dict[ProfileKey, Learner] = field(default_factory=dict)
    lengths: dict[str, DecodeLengths] = field(default_factory=dict)
    """Model -> answer lengths that the estimator has learnt."""
    identities: FIFOCache[str, tuple[str, str]] = field(
        default_factory=lambda: FIFOCache(MAX_INSTANCES)
    )
    """Instance -> engine and device, taken from statuses because activation messages lack them."""
    watch: InstanceWatch = field(default_factory=lambda: InstanceWatch(AlarmOptions()))
    samples: SampleStore = field(default_factory=lambda: SampleStore(None))
    trees: TreesWatch = field(default_factory=lambda: TreesWatch(None))
    fits: OwnFits | None = None
    """Runs periodic fits in a separate process; None if an operator runs fits."""

    def learner(self, model: str, engine: str, device: str) -> Learner:
        """Return the learner of a (model, engine, device); the first call creates the learner."""
        key = (model, engine, device)
        if key not in self.learners:
            self.learners[key] = Learner(
                key, self.iteration_memory, self.request_memory, self._lengths(model)
            )
        return self.learners[key]

    def restore(self, profiles: Iterable[Profile]) -> None:
        """
        Load the profiles that an earlier run of the estimator saved.

        The answer lengths of a model are taken from the model's latest profile.
        """
        for profile in sorted(profiles, key=lambda profile: profile.at):
            self.learner(profile.model, profile.engine, profile.device).restore(profile)
            self._lengths(profile.model).restore(profile.output_tokens)

    def _lengths(self, model: str) -> DecodeLengths:
        if model not in self.lengths:
            self.lengths[model] = DecodeLengths(
                memory=self.request_memory,
                max_applications=self.max_applications,
                pooled_requests=self.pooled_requests,
            )
        return self.lengths[model]
