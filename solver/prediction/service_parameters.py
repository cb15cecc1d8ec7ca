"""
Service parameters of a model on a device: from one batch, then from telemetry (QLM §6, table 1).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pvariance

from shared.contracts.base import Seconds, UnixTime
from solver.prediction.calibration.moments import RunningMoments

_LEAST_S = 1e-6
_FIRST_RATE_ERROR = 0.25
"""
Assumed relative error of a throughput from one batch; in simulations it was 10 to 30 % too high.
"""
_MEMORY = 200.0
"""Number of requests after which an old request has weight 1/e."""
_RATE_MEMORY = 40.0
"""
Number of busy intervals after which an old interval weighs 1/e. The number is small, because a
throughput changes with the machine's other load. The number cannot be smaller, because answers that
end together change the rate of one interval by a third.
"""
_LEAST_INTERVALS = 8
"""Number of intervals from which their spread is used as the throughput's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """Times and tokens of one served request."""

    prompt_tokens: int
    output_tokens: int
    """Number of output tokens of the request, 1 or more."""
    begun_at: UnixTime
    """Time at which serving the request began."""
    first_token_at: UnixTime
    finished_at: UnixTime

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or self.output_tokens < 1:
            raise ValueError("prompt_tokens must be 0 or more, output_tokens 1 or more")
        if not self.begun_at <= self.first_token_at <= self.finished_at < math.inf:
            raise ValueError("begun_at, first_token_at and finished_at must be in this order")

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def prefill_s(self) -> Seconds:
        return self.first_token_at - self.begun_at

    @property
    def decode_s_per_token(self) -> Seconds | None:
        """
        Decode time per token; None for an answer of one token, since the prefill produces this
        token.
        """
        if self.output_tokens == 1:
            return None
        return (self.finished_at - self.first_token_at) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceParameters:
    """Parameters of one model on one serving device (QLM table 1)."""

    token_rate_per_s: float
    """Theta: throughput in prompt and output tokens per second while batches are full."""
    rate_error: float = 0.0
    """Relative standard deviation of the throughput, common to all waiting requests."""
    prefill_s: Seconds = 0.0
    """Mean time P from the start of a request's service to its first token."""
    prefill_var: float = 0.0
    """Variance of `prefill_s` in square seconds."""
    decode_s_per_token: Seconds = 0.0
    """Decode time per token d without interruptions."""
    inefficiency: float = 1.0
    """Factor epsilon by which prefills and preemptions slow down decoding; 1 or more."""
    batch: float = 1.0
    """Number of requests that run together while other requests wait."""

    def __post_init__(self) -> None:
        if not 0 < self.token_rate_per_s < math.inf:
            raise ValueError("token_rate_per_s must be finite and above 0")
        for name in ("rate_error", "prefill_s", "prefill_var", "decode_s_per_token", "batch"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and 0 or more")
        if not 1 <= self.inefficiency < math.inf:
            raise ValueError("inefficiency must be finite and 1 or more")

    @property
    def paced_decode_s(self) -> Seconds:
        """Time per output token of a request: epsilon times d (QLM equation 4)."""
        return self.inefficiency * self.decode_s_per_token


def from_first_batch(batch: Sequence[ServedRequest]) -> ServiceParameters:
    """
    Parameters from one batch, whose requests began together on an idle engine.

    The decode time per token is that of the fastest request. The inefficiency is the mean decode
    time over that of the fastest request.

    Raises:
        ValueError: The batch is empty.

    Source: QLM §6, offline profiling (hardware).
    Differs: the throughput is the number of requests times tokens over the sum of their times since
    the batch began, instead of tokens over the duration of the batch. A single batch empties while
    its longest answer continues, but in continuous batching new requests take the free slots. By
    the duration of the batch, the throughput for answers like ShareGPT's would be three times too
    low.
    """
    if not batch:
        raise ValueError("a first batch needs at least one request")
    begun_at = min(each.begun_at for each in batch)
    stays_s = sum(each.finished_at - begun_at for each in batch)
    paces = [
        (each.decode_s_per_token, each.output_tokens - 1)
        for each in batch
        if each.decode_s_per_token is not None
    ]
    fastest_s = min((pace for pace, _ in paces), default=0.0)
    ideal_s = sum(fastest_s * tokens for _, tokens in paces)
    decoded_s = sum(pace * tokens for pace, tokens in paces)
    prefills_s = [each.prefill_s for each in batch]
    return ServiceParameters(
        token_rate_per_s=len(batch) * sum(each.tokens for each in batch) / max(_LEAST_S, stays_s),
        rate_error=_FIRST_RATE_ERROR,
        prefill_s=fmean(prefills_s),
        prefill_var=pvariance(prefills_s),
        decode_s_per_token=fastest_s,
        inefficiency=max(1.0, decoded_s / ideal_s) if ideal_s > 0 else 1.0,
        batch=float(len(batch)),
    )


class ServiceTelemetry:
    """
    Service parameters that are updated by the reports of an instance; older reports have less
    weight.

    Args:
        first: Parameters until reports come. The decode time per token stays; reports change the
            inefficiency instead.
        memory: Number of requests after which an old request weighs 1/e.
        rate_memory: Number of busy intervals after which an old interval weighs 1/e.

    Source: QLM §6 assumes that all parameters are constant once profiled.
    Differs: parameters follow telemetry, because the load changes how requests slow one another.
    """

    def __init__(
        self,
        first: ServiceParameters,
        *,
        memory: float = _MEMORY,
        rate_memory: float = _RATE_MEMORY,
    ) -> None:
        self._first = first
        self._rate_memory = rate_memory
        self._keep, self._keep_rate = math.exp(-1 / memory), math.exp(-1 / rate_memory)
        self._tokens = self._busy_s = 0.0
        self._paced_s = self._paced_tokens = 0.0
        self._rates = RunningMoments(memory=rate_memory)
        self._batches = RunningMoments(memory=rate_memory)
        self._prefill = RunningMoments(memory=memory)

    def observe_busy(self, *, tokens: float, busy_s: Seconds, running: float) -> None:
        """
        Learn from a busy interval: requests waited during the whole interval.

        Args:
            tokens: Tokens computed in the interval, without recomputed tokens.
            busy_s: Length of the interval; an interval without time or tokens is ignored.
            running: Average number of requests that ran together.
        """
        if not (0 < busy_s < math.inf and 0 < tokens < math.inf and running >= 0):
            return
        self._tokens = self._keep_rate * self._tokens + tokens
        self._busy_s = self._keep_rate * self._busy_s + busy_s
        self._rates.observe(tokens / busy_s)
        self._batches.observe(running)

    def observe_request(self, served: ServedRequest) -> None:
        """Learn from a completed request."""
        self._prefill.observe(served.prefill_s)
        if served.decode_s_per_token is not None:
            tokens = served.output_tokens - 1
            self._paced_tokens = self._keep * self._paced_tokens + tokens
            self._paced_s = self._keep * self._paced_s + tokens * served.decode_s_per_token

    @property
    def num_reports(self) -> int:
        """Number of busy intervals that were observed."""
        return self._rates.count

    @property
    def parameters(self) -> ServiceParameters:
        """The current service parameters."""
        found = self._first
        rates, batches, prefill = (
            each.value() for each in (self._rates, self._batches, self._prefill)
        )
        if rates is not None and batches is not None:
            rate = self._tokens / self._busy_s
            found = replace(found, token_rate_per_s=rate, batch=batches.mean)
            if rates.count >= _LEAST_INTERVALS:
                # Standard error of the mean rate. The random variation within one interval is
                # already part of the variance of tokens.
                count = min(rates.count, self._rate_memory)
                error = rates.sd / rates.mean / math.sqrt(count)
                found = replace(found, rate_error=error)
        if prefill is not None:
            found = replace(found, prefill_s=prefill.mean, prefill_var=prefill.sd**2)
        if self._paced_tokens > 0 and found.decode_s_per_token > 0:
            paced_s = self._paced_s / self._paced_tokens
            factor = max(1.0, paced_s / found.decode_s_per_token)
            found = replace(found, inefficiency=factor)
        return found
