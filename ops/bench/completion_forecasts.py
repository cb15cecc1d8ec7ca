"""What a benchmark foretells of groups before they are served, and how well that was."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shared.contracts.base import Seconds, UnixTime
from solver.prediction.completion import (
    Ahead,
    GroupWork,
    TokenMoments,
    group_completion_time,
    waiting_time,
)
from solver.prediction.completion_calibration import LEVEL, CompletionCalibration, Foretold
from solver.prediction.moments import RunningMoments
from solver.prediction.service_parameters import (
    ServedRequest,
    ServiceParameters,
    ServiceTelemetry,
    from_first_batch,
)

_HISTORY = 5000.0
"""Requests, of lengths, after which an old one weighs 1/e."""
_REPORTS = 8
"""Of telemetry, before forecasts are corrected by what came of them."""


class Lengths:
    """Of prompts and answers, as earlier traffic had them (QLM §6, workload profiling)."""

    def __init__(self, prompts: Sequence[int], outputs: Sequence[int]) -> None:
        self._prompts, self._outputs = (RunningMoments(memory=_HISTORY) for _ in range(2))
        self._tokens = RunningMoments(memory=_HISTORY)
        for prompt, output in zip(prompts, outputs, strict=True):
            self.observe(prompt, output)

    def observe(self, prompt: int, output: int) -> None:
        """Learn from a request that is done."""
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
        """Relative standard error of a request's mean tokens."""
        found = self._tokens.value()
        if found is None or found.mean <= 0:
            return 0.0
        return found.sd / found.mean / math.sqrt(min(found.count, _HISTORY))


def _moments(running: RunningMoments) -> TokenMoments:
    found = running.value()
    return TokenMoments.of(0.0) if found is None else TokenMoments.of(found.mean, found.sd)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupForecast:
    """Of one group, logged before any of it is served."""

    queue_length: int
    """Block of the load in which it came."""
    ahead: int
    num_requests: int
    wait: Foretold
    """Until the turn of its first request."""
    completion: Foretold
    """Until the last token of its last one."""
    learnt: bool
    """By telemetry, and not by the first batch alone."""
    by_first_batch_s: Seconds
    """Mean wait, had nothing been learnt since the first batch."""

    @property
    def corrected(self) -> bool:
        """Whether it rests on telemetry and on what came of earlier forecasts."""
        return self.learnt and self.wait.corrected is not self.wait.raw


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedGroup:
    """What was foretold, and what came."""

    forecast: GroupForecast
    came_at: UnixTime
    wait_s: Seconds
    completion_s: Seconds


class Forecaster:
    """
    Foretells groups of one model on one device.

    Args:
        first_batch: What is known of the device at first.
        lengths: Of the traffic; goes on to learn.
        most_output: Tokens that no answer exceeds.
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

    def foretell(
        self, *, queue_length: int, ahead: int, num_requests: int, running: float
    ) -> GroupForecast:
        """A group that comes behind *ahead* waiting requests, while *running* run."""
        known, output = self._known(), self._lengths.output
        tokens = self._lengths.prompt.plus(output)

        def wait(count: int, service: ServiceParameters) -> Foretold:
            found = waiting_time(
                Ahead.of(float(count), tokens), service, output=output, running=running
            )
            return self._waits.foretell(found)

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
            completion=self._completions.foretell(done),
            learnt=self.telemetry.num_reports >= _REPORTS,
            by_first_batch_s=float(wait(ahead, self._first).raw.mean_s),
        )

    def served(self, request: ServedRequest) -> None:
        """Learn from a request that is done."""
        self.telemetry.observe_request(request)
        self._lengths.observe(request.prompt_tokens, request.output_tokens)

    def _known(self) -> ServiceParameters:
        """What a request's mean tokens may be off by is common to all that wait, too."""
        known = self.telemetry.parameters
        return replace(known, rate_error=math.hypot(known.rate_error, self._lengths.error))

    def observe(self, passed: PassedGroup) -> None:
        """Learn what came of a group; what one batch did not know, telemetry has told already."""
        self.passed.append(passed)
        if not passed.forecast.learnt:
            return
        self._waits.observe(passed.forecast.wait, passed.wait_s)
        self._completions.observe(passed.forecast.completion, passed.completion_s)


def r_squared(foretold: Sequence[float], actual: Sequence[float]) -> float:
    """Coefficient of determination of the forecasts themselves, not of a line through them."""
    actuals = np.asarray(actual)
    missed = float(((actuals - np.asarray(foretold)) ** 2).sum())
    return 1 - missed / max(1e-12, float(((actuals - actuals.mean()) ** 2).sum()))


def covered(told: Sequence[tuple[Foretold, Seconds]]) -> tuple[float, float]:
    """Shares of times within their 90 % interval, as corrected and before corrections."""
    raw, corrected = 0, 0
    for each, actual_s in told:
        for number, time in enumerate(each):
            low_s, high_s = time.interval(LEVEL)
            held = bool(low_s <= actual_s <= high_s)
            raw, corrected = (raw + held, corrected) if number == 0 else (raw, corrected + held)
    count = max(1, len(told))
    return corrected / count, raw / count


def figures_of(groups: Sequence[PassedGroup]) -> dict[str, dict[str, float]]:
    """R2, coverage and bias of waits and completions."""
    waits = [(each.forecast.wait, each.wait_s) for each in groups]
    ends = [(each.forecast.completion, each.completion_s) for each in groups]
    found = {"waiting": accuracy(waits), "completion": accuracy(ends)}
    found["waiting"]["R2 by the first batch alone"] = r_squared(
        [each.forecast.by_first_batch_s for each in groups], [actual_s for _, actual_s in waits]
    )
    return found


def accuracy(told: Sequence[tuple[Foretold, Seconds]]) -> dict[str, float]:
    """R2 of the means, coverage of the 90 % intervals, and bias."""
    actual = [actual_s for _, actual_s in told]
    raw = [float(each.raw.mean_s) for each, _ in told]
    corrected = [float(each.corrected.mean_s) for each, _ in told]
    share, raw_share = covered(told)
    return {
        "R2": r_squared(corrected, actual),
        "R2, not corrected": r_squared(raw, actual),
        "in the 90 % interval": share,
        "not corrected": raw_share,
        "foretold / actual": sum(corrected) / max(1e-12, sum(actual)),
    }
