"""A benchmark's predictions for groups before they are served, and their accuracy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shared.contracts.base import Seconds, UnixTime
from solver.prediction.calibration.completion_calibration import (
    LEVEL,
    CompletionCalibration,
    PredictedTime,
)
from solver.prediction.calibration.moments import RunningMoments
from solver.prediction.completion import (
    Ahead,
    GroupWork,
    TokenMoments,
    group_completion_time,
    waiting_time,
)
from solver.prediction.service_parameters import (
    ServedRequest,
    ServiceParameters,
    ServiceTelemetry,
    from_first_batch,
)

_HISTORY = 5000.0
"""Memory of the length estimates: number of requests after which a sample's weight is 1/e."""
_REPORTS = 8
"""Number of telemetry reports before outcomes of forecasts correct later forecasts."""


class Lengths:
    """Lengths of prompts and answers of earlier requests (QLM §6, workload profiling)."""

    def __init__(self, prompts: Sequence[int], outputs: Sequence[int]) -> None:
        self._prompts, self._outputs = (RunningMoments(memory=_HISTORY) for _ in range(2))
        self._tokens = RunningMoments(memory=_HISTORY)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.observe(prompt, output)

    def observe(self, prompt: int, output: int) -> None:
        """Learn the lengths of a completed request."""
        self._prompts.observe(prompt)
        self._outputs.observe(output)
        self._tokens.observe(prompt + output)

    @property
    def prompt(self) -> TokenMoments:
        return _moments(self._prompts)

    @property
    def output(self) -> TokenMoments:
        return _moments(self._outputs)

    @property
    def error(self) -> float:
        """Relative standard error of the mean number of tokens per request."""
        found = self._tokens.value()
        if found is None or found.mean <= 0:
            return 0.0
        return found.sd / found.mean / math.sqrt(min(found.count, _HISTORY))


def _moments(running: RunningMoments) -> TokenMoments:
    found = running.value()
    return TokenMoments.of(0.0) if found is None else TokenMoments.of(found.mean, found.sd)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupForecast:
    """Forecast of one group, recorded before any request of the group is served."""

    queue_length: int
    """Target length of the queue when the group arrived."""
    ahead: int
    num_requests: int
    wait: PredictedTime
    """Predicted time until service of the group's first request begins."""
    completion: PredictedTime
    """Predicted time until the last token of the group's last request."""
    learnt: bool
    """True if the forecast uses telemetry in addition to the first batch."""
    by_first_batch_s: Seconds
    """Mean wait predicted from the first batch without telemetry."""

    @property
    def corrected(self) -> bool:
        """True if the forecast uses telemetry and the outcomes of earlier forecasts."""
        return self.learnt and self.wait.corrected is not self.wait.raw


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedGroup:
    """A forecast of a group's waiting and completion times, and the actual times."""

    forecast: GroupForecast
    came_at: UnixTime
    wait_s: Seconds
    completion_s: Seconds


class Forecaster:
    """
    Predicts waits and completion times for groups of one model on one device.

    Args:
        first_batch: Initial observations of the device.
        lengths: Lengths of the traffic; updated with each served request.
        most_output: Upper limit of an answer's tokens.
    """

    def __init__(
        self, first_batch: Sequence[ServedRequest], lengths: Lengths, *, most_output: int
    ) -> None:
        self._first = from_first_batch(first_batch)
        self._lengths = lengths
        self._most_output = most_output
        self._waits, self._completions = CompletionCalibration(), CompletionCalibration()
        self.telemetry = ServiceTelemetry(self._first)
        self.passed: list[PassedGroup] = []

    def predict(
        self, *, queue_length: int, ahead: int, num_requests: int, running: float
    ) -> GroupForecast:
        """Forecast of a group behind *ahead* waiting requests, while *running* requests run."""
        known, output = self._known(), self._lengths.output
        tokens = self._lengths.prompt.plus(output)

        def wait(count: int, service: ServiceParameters) -> PredictedTime:
            found = waiting_time(
                Ahead.of(float(count), tokens), service, output=output, running=running
            )
            return self._waits.predict(found)

        work = GroupWork(
            num_requests=np.array(float(num_requests)),
            prompt=self._lengths.prompt,
            output=output,
            most_output=float(self._most_output),
        )
        last = wait(ahead + num_requests - 1, known).raw
        done = group_completion_time(last, work, known).as_distribution()
        return GroupForecast(
            queue_length=queue_length,
            ahead=ahead,
            num_requests=num_requests,
            wait=wait(ahead, known),
            completion=self._completions.predict(done),
            learnt=self.telemetry.num_reports >= _REPORTS,
            by_first_batch_s=float(wait(ahead, self._first).raw.mean_s),
        )

    def served(self, request: ServedRequest) -> None:
        """Learn from a completed request."""
        self.telemetry.observe_request(request)
        self._lengths.observe(request.prompt_tokens, request.output_tokens)

    def _known(self) -> ServiceParameters:
        """
        Service parameters that include, in the rate error, the error of the mean tokens per
        request.
        """
        known = self.telemetry.parameters
        return replace(known, rate_error=math.hypot(known.rate_error, self._lengths.error))

    def observe(self, passed: PassedGroup) -> None:
        """
        Learn from the actual times of a group, unless the forecast was made without telemetry.
        """
        self.passed.append(passed)
        if not passed.forecast.learnt:
            return
        self._waits.observe(passed.forecast.wait, passed.wait_s)
        self._completions.observe(passed.forecast.completion, passed.completion_s)


def r_squared(predicted_wait: Sequence[float], actual: Sequence[float]) -> float:
    """Coefficient of determination of the forecasts, without fitting a line."""
    actuals = np.asarray(actual)
    missed = float(((actuals - np.asarray(predicted_wait)) ** 2).sum())
    return 1 - missed / max(1e-12, float(((actuals - actuals.mean()) ** 2).sum()))


def covered(predicted: Sequence[tuple[PredictedTime, Seconds]]) -> tuple[float, float]:
    """
    Shares of times within their 90 % interval, with and without the correction of the forecast.
    """
    raw, corrected = 0, 0
    for each, actual_s in predicted:
        for number, time in enumerate(each):
            low_s, high_s = time.interval(LEVEL)
            held = bool(low_s <= actual_s <= high_s)
            raw, corrected = (raw + held, corrected) if number == 0 else (raw, corrected + held)
    count = max(1, len(predicted))
    return corrected / count, raw / count


def figures_of(groups: Sequence[PassedGroup]) -> dict[str, dict[str, float]]:
    """R2, coverage and bias of the predicted waiting times and completion times."""
    waits = [(each.forecast.wait, each.wait_s) for each in groups]
    ends = [(each.forecast.completion, each.completion_s) for each in groups]
    found = {"waiting": accuracy(waits), "completion": accuracy(ends)}
    found["waiting"]["R2 by the first batch alone"] = r_squared(
        [each.forecast.by_first_batch_s for each in groups], [actual_s for _, actual_s in waits]
    )
    return found


def accuracy(predicted: Sequence[tuple[PredictedTime, Seconds]]) -> dict[str, float]:
    """R2 of the predicted means, coverage of the 90 % intervals, and bias."""
    actual = [actual_s for _, actual_s in predicted]
    raw = [float(each.raw.mean_s) for each, _ in predicted]
    corrected = [float(each.corrected.mean_s) for each, _ in predicted]
    share, raw_share = covered(predicted)
    return {
        "R2": r_squared(corrected, actual),
        "R2, not corrected": r_squared(raw, actual),
        "in the 90 % interval": share,
        "not corrected": raw_share,
        "predicted / actual": sum(corrected) / max(1e-12, sum(actual)),
    }
