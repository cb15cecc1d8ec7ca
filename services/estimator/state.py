"""What the estimator has learnt, per (model, engine, device)."""

import math
from dataclasses import dataclass, field

from shared.contracts.base import ModelName, UnixTime
from shared.contracts.estimates import Profile
from shared.contracts.telemetry import IterationsObserved, ModelActivated, RequestObserved
from solver.prediction.latency_model import OnlineLatencyFit
from solver.prediction.moments import RunningMoments
from solver.prediction.service_time import ALL_APPLICATIONS

ProfileKey = tuple[str, str, str]


@dataclass(slots=True)
class Learner:
    """One profile in the making."""

    key: ProfileKey
    iteration_memory: float
    request_memory: float
    max_applications: int
    fit: OnlineLatencyFit = field(init=False)
    prefill_s: RunningMoments = field(init=False)
    output_tokens: dict[str, RunningMoments] = field(default_factory=dict)
    swap_s: dict[str, RunningMoments] = field(default_factory=dict)
    prior: Profile | None = None
    """What an earlier estimator knew; stands in for terms not yet learnt."""
    version: int = 0
    changed: bool = True
    _busy_tokens: float = 0.0
    _busy_s: float = 0.0

    def __post_init__(self) -> None:
        self.fit = OnlineLatencyFit(memory=self.iteration_memory)
        self.prefill_s = RunningMoments(memory=self.request_memory)

    def on_iterations(self, observed: IterationsObserved) -> None:
        """Learn latency and throughput."""
        keep = math.exp(-len(observed.iterations) / self.iteration_memory)
        self._busy_tokens *= keep
        self._busy_s *= keep
        for iteration in observed.iterations:
            self.fit.observe(iteration)
            self._busy_tokens += iteration.compute_tokens
            self._busy_s += iteration.duration_s
        self.changed = True

    def on_request(self, observed: RequestObserved) -> None:
        """Learn lengths and prefill times from requests that ran undisturbed to their end."""
        if observed.outcome != "completed":
            return
        self._lengths(ALL_APPLICATIONS).observe(observed.output_tokens)
        if observed.application in self.output_tokens or (
            len(self.output_tokens) <= self.max_applications
        ):
            self._lengths(observed.application).observe(observed.output_tokens)
        if observed.evictions == 0:
            self.prefill_s.observe(max(0.0, observed.first_token_at - observed.submitted_at))
        self.changed = True

    def on_activated(self, observed: ModelActivated) -> None:
        """Learn what a swap costs."""
        moments = self.swap_s.setdefault(observed.source.value, RunningMoments(memory=10))
        moments.observe(observed.duration_s)
        self.changed = True

    def _lengths(self, application: str) -> RunningMoments:
        return self.output_tokens.setdefault(
            application, RunningMoments(memory=self.request_memory)
        )

    def profile(self, now: UnixTime) -> Profile:
        """Everything known, as a new version."""
        self.version = max(self.version + 1, int(now * 1000))
        self.changed = False
        model, engine, device = self.key
        latency, errors = self.fit.fit(), self.fit.errors
        prior = self.prior
        lengths = dict(prior.output_tokens) if prior else {}
        lengths |= {
            name: value
            for name, moments in self.output_tokens.items()
            if (value := moments.value()) is not None
        }
        swap_s = dict(prior.swap_s) if prior else {}
        swap_s |= {
            source: value.mean
            for source, moments in self.swap_s.items()
            if (value := moments.value()) is not None
        }
        return Profile(
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
            output_tokens=lengths,
            swap_s=swap_s,
        )


@dataclass(slots=True, kw_only=True)
class EstimatorState:
    """All learners."""

    iteration_memory: float
    request_memory: float
    max_applications: int
    learners: dict[ProfileKey, Learner] = field(default_factory=dict)
    identities: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Engine and device by instance, from statuses; activations do not carry them."""

    def learner(self, model: str, engine: str, device: str) -> Learner:
        """The learner of a key, made on first use."""
        key = (model, engine, device)
        if key not in self.learners:
            self.learners[key] = Learner(
                key, self.iteration_memory, self.request_memory, self.max_applications
            )
        return self.learners[key]
