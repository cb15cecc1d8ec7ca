"""Answer lengths of each application of a model (QoServe §3.4, QLM §6)."""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from shared.contracts.base import UnixTime
from shared.contracts.estimates import Moments, OutputTokens
from solver.prediction.calibration.running_calibration import RunningCalibration
from solver.prediction.latency.service_time import ALL_APPLICATIONS
from solver.prediction.lengths.length_sketch import LengthDistribution, LengthSketch, log_normal

LEVELS = (0.5, 0.9, 0.99)
"""Levels of the reported quantiles of answer lengths."""
PRIOR = Moments(mean=128.0, sd=192.0, count=0)
"""
Moments of an answer's length, assumed before the first answer of a model.

The median is 71 tokens; QoServe's applications have medians of 8, 41 and 415 (table 2).
"""
POOLED_REQUESTS = 10.0
"""Number of answers that the estimate of all applications, or the prior of a model, counts as."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Length of one answer, and the reason of its end."""

    tokens: int
    max_tokens: float = math.inf
    """Token limit of the answer's request, if known."""
    cut: bool = False
    """True if a limit ended the answer; False if the model ended it."""

    @property
    def limit_tokens(self) -> float:
        return self.tokens if self.cut else self.max_tokens


@dataclass(slots=True)
class _History:
    sketch: LengthSketch
    calibration: RunningCalibration
    earlier: OutputTokens | None = None
    """
    Estimate of the application's answer lengths that was adopted from an earlier estimator process.
    """
    count: int = 0
    estimate: OutputTokens | None = None
    """Current estimate of the application's answer lengths; None until it is computed again."""

    def observe(self, answer: Answer) -> None:
        """Learn the length of an answer of the application."""
        if answer.cut:
            self.sketch.observe_cut(answer.tokens)
        else:
            self.sketch.observe(answer.tokens)
        self.count += 1
        self.estimate = None

    def judge(self, predicted: OutputTokens, answer: Answer, at: UnixTime) -> None:
        """Add the errors of the prediction *predicted* for this answer."""
        limit = answer.limit_tokens
        self.calibration.observe(min(predicted.mean, limit) - answer.tokens, at=at)
        for level, tokens in predicted.quantiles:
            if tokens < limit and level in LEVELS:
                self.calibration.covered(level, float(answer.tokens <= tokens))


class DecodeLengths:
    """
    Mean, standard deviation and quantiles of answer lengths, by application of one model.

    An application with few answers is assumed to be similar to all applications (`*`), and a model
    with few answers to `PRIOR`: this parent counts as *pooled_requests* answers
    (`LengthSketch.pooled`).

    Source: QoServe §3.4 (history by application), QLM §6 (workload profiling).
    Decided: the papers give neither the size of a history nor the estimate for an application
    without history. Here estimates are partially pooled, with the same weight for applications and
    models. An answer cut by its limit is a censored observation. Answers of requests that ignore
    the model's end token have no information and must not be observed. A quantile is judged only by
    answers whose limit was above it. The applications that were inactive for longest are forgotten
    first. The estimate of an application is updated when one of its own answers comes.

    Args:
        memory: Number of answers of an application after which an old answer weighs 1/e.
        max_applications: Most applications with their own history, 0 or more; other applications
            only count as `*`.
        pooled_requests: Weight of a parent, as a number of answers above 0.
    """

    def __init__(
        self,
        *,
        memory: float = 500.0,
        max_applications: int = 1000,
        pooled_requests: float = POOLED_REQUESTS,
    ) -> None:
        self._memory = memory
        self._max_applications = max_applications
        self._pooled_requests = pooled_requests
        self._all = self._history()
        self._applications: OrderedDict[str, _History] = OrderedDict()
        self._prior = _distribution(PRIOR)
        self._distribution = self._prior

    def observe(self, application: str, answer: Answer, *, at: UnixTime) -> None:
        """Learn from an answer to a request of *application* at time *at*."""
        predicted = self.estimate(application)
        judged = [self._all]
        if application != ALL_APPLICATIONS:
            judged += self._touched(application)
        if self.has_observations:
            for history in judged:
                history.judge(predicted, answer, at)
        for history in judged:
            history.observe(answer)
        self._distribution = self._pooled(self._all, self._prior)

    def estimate(self, application: str) -> OutputTokens:
        """
        Expected length for *application*, or for all applications if *application* is unknown.
        """
        history = self._applications.get(application)
        if history is None:
            if self._all.estimate is None:
                self._all.estimate = _estimate(self._all, self._distribution)
            return self._all.estimate
        if history.estimate is None:
            history.estimate = _estimate(history, self._pooled(history, self._distribution))
        return history.estimate

    def estimates(self) -> dict[str, OutputTokens]:
        """
        Estimates of `*`, then of each application, the latest last; empty before the first answer.
        """
        if not self.has_observations:
            return {}
        names = (ALL_APPLICATIONS, *self._applications)
        return {name: self.estimate(name) for name in names}

    @property
    def has_observations(self) -> bool:
        """True if an answer was observed, by this process or by an earlier estimator process."""
        return self._all.count > 0 or self._all.earlier is not None

    @property
    def num_applications(self) -> int:
        """Number of applications with their own history of answer lengths."""
        return len(self._applications)

    def restore(self, earlier: Mapping[str, OutputTokens]) -> None:
        """
        Adopt `estimates` of an earlier estimator; they become parents when the first answers come.
        """
        for application, estimate in earlier.items():
            histories = (
                [self._all] if application == ALL_APPLICATIONS else self._touched(application)
            )
            for history in histories:
                history.earlier, history.estimate = estimate, None
        self._distribution = self._pooled(self._all, self._prior)

    def _history(self) -> _History:
        return _History(
            LengthSketch(memory=self._memory),
            RunningCalibration(memory=self._memory, levels=LEVELS),
        )

    def _touched(self, application: str) -> list[_History]:
        """
        Return the application's history, and mark it as the latest; an empty history if none is
        kept.
        """
        history = self._applications.pop(application, None) or self._history()
        self._applications[application] = history
        if len(self._applications) > self._max_applications:
            self._applications.popitem(last=False)
        return [history] if self._max_applications else []

    def _pooled(self, history: _History, parent: LengthDistribution) -> LengthDistribution:
        if history.earlier is not None:
            parent = _distribution(history.earlier)
        return history.sketch.pooled(parent, weight=self._pooled_requests)


def _distribution(moments: Moments) -> LengthDistribution:
    return log_normal(mean_tokens=moments.mean, sd_tokens=moments.sd)


def _estimate(history: _History, distribution: LengthDistribution) -> OutputTokens:
    if history.count == 0 and history.earlier is not None:
        return history.earlier
    return OutputTokens(
        mean=round(distribution.mean_tokens, 4),
        sd=round(distribution.sd_tokens, 4),
        count=history.count,
        quantiles=tuple((level, distribution.quantile_tokens(level)) for level in LEVELS),
        calibration=history.calibration.value(),
    )
