"""What the estimator has learnt, per (model, engine, device)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.estimator.alarms import InstanceWatch
from services.estimator.observations import (
    WAIT_LEVELS,
    ProfileKey,
    answer_of,
    began_once,
    judge_wait,
    with_pairs,
)
from services.estimator.own_fits import OwnFits
from services.estimator.sample_store import SampleStore
from services.estimator.trees import TreesWatch
from shared.contracts.base import ModelName, UnixTime
from shared.contracts.estimates import Profile
from shared.contracts.telemetry import IterationsObserved, ModelActivated, RequestObserved
from solver.prediction.alarms import AlarmOptions
from solver.prediction.decode_lengths import POOLED_REQUESTS, DecodeLengths
from solver.prediction.latency_model import OnlineLatencyFit
from solver.prediction.moments import RunningMoments
from solver.prediction.running_calibration import RunningCalibration


@dataclass(slots=True)
class Learner:
    """One profile in the making."""

    key: ProfileKey
    iteration_memory: float
    request_memory: float
    lengths: DecodeLengths
    """Of the model, on whatever engines and devices."""
    fit: OnlineLatencyFit = field(init=False)
    latency_calibration: RunningCalibration = field(init=False)
    wait_calibration: RunningCalibration = field(init=False)
    prefill_s: RunningMoments = field(init=False)
    swap_s: dict[str, RunningMoments] = field(default_factory=dict)
    prior: Profile | None = None
    """What an earlier estimator knew; stands in for terms not yet learnt."""
    latest: Profile | None = None
    """What was published last."""
    version: int = 0
    changed: bool = True
    _busy_tokens: float = 0.0
    _busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.fit = OnlineLatencyFit(memory=self.iteration_memory)
        self.prefill_s = RunningMoments(memory=self.request_memory)
        self.latency_calibration = RunningCalibration(memory=self.iteration_memory)
        self.wait_calibration = RunningCalibration(memory=self.request_memory, levels=WAIT_LEVELS)

    def restore(self, profile: Profile) -> None:
        """Begin with what an earlier estimator knew."""
        self.prior = profile
        self.version = max(self.version, profile.version)
        if profile.latency is not None:
            self.fit.believe(profile.latency)

    def on_iterations(self, observed: IterationsObserved) -> None:
        """Learn latency and throughput."""
        keep = math.exp(-len(observed.iterations) / self.iteration_memory)
        self._busy_tokens *= keep
        self._busy_s *= keep
        for iteration, pairs in with_pairs(observed):
            self.fit.observe(iteration, pairs)
            self._busy_tokens += iteration.compute_tokens
            self._busy_s += iteration.duration_s
        self.changed = True

    def judge_latency(self, multiples: Sequence[float], *, at: UnixTime) -> None:
        """Hold the latest profile against what iterations took, as multiples of what it said."""
        for multiple in multiples:
            self.latency_calibration.observe(1 / multiple - 1, at=at)

    def on_request(self, observed: RequestObserved) -> None:
        """Learn lengths and prefill times from requests that ran undisturbed to their end."""
        if observed.outcome != "completed":
            return
        if (answer := answer_of(observed)) is not None:
            self.lengths.observe(observed.application, answer, at=observed.finished_at)
        if observed.evictions == 0:
            if began_once(observed):
                self.prefill_s.observe(observed.first_token_at - observed.submitted_at)
            judge_wait(self.wait_calibration, observed)
        self.changed = True

    def on_activated(self, observed: ModelActivated) -> None:
        """Learn what a swap costs."""
        moments = self.swap_s.setdefault(observed.source.value, RunningMoments(memory=10))
        moments.observe(observed.duration_s)
        self.changed = True

    def profile(self, now: UnixTime) -> Profile:
        """Everything known, as a new version."""
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
            swap_s=swap_s,
        )
        return self.latest


@dataclass(slots=True, kw_only=True)
class EstimatorState:
    """All learners."""

    iteration_memory: float
    request_memory: float
    max_applications: int
    pooled_requests: float = POOLED_REQUESTS
    learners: dict[ProfileKey, Learner] = field(default_factory=dict)
    lengths: dict[str, DecodeLengths] = field(default_factory=dict)
    """By model."""
    identities: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Engine and device by instance, from statuses; activations do not carry them."""
    watch: InstanceWatch = field(default_factory=lambda: InstanceWatch(AlarmOptions()))
    samples: SampleStore = field(default_factory=lambda: SampleStore(None))
    trees: TreesWatch = field(default_factory=lambda: TreesWatch(None))
    fits: OwnFits | None = None
    """None: others fit."""

    def learner(self, model: str, engine: str, device: str) -> Learner:
        """The learner of a key, made on first use."""
        key = (model, engine, device)
        if key not in self.learners:
            self.learners[key] = Learner(
                key, self.iteration_memory, self.request_memory, self._lengths(model)
            )
        return self.learners[key]

    def restore(self, profiles: Iterable[Profile]) -> None:
        """Take over what an earlier estimator knew; of a model's lengths, the latest."""
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
