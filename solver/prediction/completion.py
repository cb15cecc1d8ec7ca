"""Waiting and completion times of requests and request groups as distributions (QLM §6)."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from solver.prediction.service_parameters import ServiceParameters
from solver.prediction.time_distribution import (
    Floats,
    TimeDistribution,
    normal_cdf,
)

_POINTS = 32
"""Number of points of equal probability that represent a group's completion time."""
_GRID = 96
"""Number of times at which the last decode of a group is evaluated."""
_ALONE = 16
"""
Number of last requests of a group that are evaluated one by one; earlier requests are sampled.
"""
_FAR_SD = 4.5
_LEAST_S = 1e-9
_LEVELS = (np.arange(_POINTS) + 0.5) / _POINTS


@dataclass(frozen=True, slots=True)
class TokenMoments:
    """Mean and variance of the tokens of one request of each group; arrays of matching shapes."""

    mean: Floats
    variance: Floats

    @classmethod
    def of(cls, mean: ArrayLike, sd: ArrayLike = 0.0) -> Self:
        """
        Make moments from mean and standard deviation.

        Raises:
            ValueError: The mean or the standard deviation is negative or not finite.
        """
        means, sds = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (mean, sd)))
        if not (np.all(np.isfinite(means + sds)) and np.all(means >= 0) and np.all(sds >= 0)):
            raise ValueError("mean and sd of tokens must be finite and 0 or more")
        return cls(means, sds**2)

    def plus(self, other: "TokenMoments") -> "TokenMoments":
        """Moments of the sum of this amount and an independent amount."""
        return TokenMoments(self.mean + other.mean, self.variance + other.variance)


@dataclass(frozen=True, slots=True)
class Ahead:
    """Work before a request: number of requests, and moments of the sum of their tokens."""

    num_requests: Floats
    tokens: TokenMoments

    @classmethod
    def of(cls, num_requests: ArrayLike, per_request: TokenMoments) -> Self:
        """
        Make `Ahead` of independent requests of one kind.

        Raises:
            ValueError: *num_requests* is negative or not finite.
        """
        count = np.asarray(num_requests, np.float64)
        if not (np.all(np.isfinite(count)) and np.all(count >= 0)):
            raise ValueError("num_requests ahead must be finite and 0 or more")
        return cls(count, TokenMoments(count * per_request.mean, count * per_request.variance))

    def plus(self, other: "Ahead") -> "Ahead":
        """Sum of two amounts of work before a request: counts, means and variances add up."""
        return Ahead(self.num_requests + other.num_requests, self.tokens.plus(other.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWork:
    """Request groups, each served first come, first served; arrays of matching shapes."""

    num_requests: Floats
    """Number of requests of each group, 1 or more."""
    prompt: TokenMoments
    output: TokenMoments
    most_output: Floats | float = math.inf
    """Longest possible answer, in tokens; cuts the tail of predicted lengths."""

    @property
    def tokens(self) -> TokenMoments:
        """Total tokens of one request of each group: prompt and answer."""
        return self.prompt.plus(self.output)


@dataclass(frozen=True, slots=True)
class GroupCompletion:
    """Completion times of groups, as points of equal probability."""

    points_s: Floats
    """Completion times of equal probability, float64[..., 32], rising along the last axis."""

    @property
    def mean_s(self) -> Floats:
        return np.asarray(self.points_s.mean(axis=-1))

    @property
    def variance(self) -> Floats:
        return np.asarray(self.points_s.var(axis=-1))

    def quantile(self, level: float) -> Floats:
        """
        Time in seconds within which a group is complete with probability *level*.

        Raises:
            ValueError: *level* is not above 0 and below 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"a quantile's level must be above 0 and below 1, not {level}")
        place = level * _POINTS - 0.5
        below = int(np.clip(np.floor(place), 0, _POINTS - 2))
        first, second = self.points_s[..., below], self.points_s[..., below + 1]
        share = min(1.0, max(0.0, place - below))
        return np.asarray((1 - share) * first + share * second)

    def cdf(self, time_s: ArrayLike) -> Floats:
        """Probability that a group is complete within *time_s*, in steps of 1/32."""
        time = np.asarray(time_s, np.float64)[..., np.newaxis]
        return np.asarray((self.points_s <= time).mean(axis=-1))

    def as_distribution(self) -> TimeDistribution:
        """The lognormal distribution with the mean and variance of the completion times."""
        return TimeDistribution.of(self.mean_s, self.variance)


def waiting_time(
    ahead: Ahead,
    service: ServiceParameters,
    *,
    output: TokenMoments | None = None,
    running: ArrayLike | None = None,
) -> TimeDistribution:
    """
    Waiting time W until a request is served.

    Args:
        ahead: Work before the request.
        output: Moments of the answers of running requests; without it, running requests are
            ignored.
        running: Number of running requests; without it, a full batch.

    Source: QLM equations 2 and 3: tokens ahead over the throughput; means and variances of
    independent requests add up.
    Differs: prompt tokens count, because prefills use the part of the token budget that decodes do
    not use. The error of the throughput is common to all tokens, so the standard deviation grows
    linearly with the wait, not with its square root. Running requests delay the turn only as far as
    they must finish to free a slot: an engine with free slots admits some requests immediately. On
    a full engine, the remaining lengths of the answers that run now and of those that run at the
    turn both add to the variance.
    """
    mean, variance = ahead.tokens.mean, ahead.tokens.variance
    if output is not None:
        now = service.batch if running is None else np.asarray(running, np.float64)
        left = _remainder(output)
        # Share of the requests running at the turn that do not run now: all of them, once as many
        # requests have begun as run together.
        others = np.minimum(1.0, ahead.num_requests / max(1.0, service.batch))
        mean = np.maximum(0.0, mean + (now - service.batch) * left.mean)
        variance = variance + others * (now + service.batch) * left.variance
    mean_s = mean / service.token_rate_per_s
    common = (service.rate_error * mean_s) ** 2
    return TimeDistribution.of(mean_s, variance / service.token_rate_per_s**2 + common)


def completion_time(
    wait: TimeDistribution, output: TokenMoments, service: ServiceParameters
) -> TimeDistribution:
    """
    Completion time of one request from now to its last token: C = W + P + D, D = O · epsilon · d.

    Source: QLM equations 1 and 4.
    """
    return wait.plus(_prefill(service)).plus(_decode(output, service))


def group_completion_time(
    wait: TimeDistribution, work: GroupWork, service: ServiceParameters
) -> GroupCompletion:
    """
    Time until the last token of the last request of each group.

    Args:
        wait: Time until the turn of each group's **last** request, so it includes the turns of the
            group's other requests.
        work: The groups, of the shape of *wait*.

    Raises:
        ValueError: A group has less than one request.

    Source: QLM equation 5, the maximum over the group.
    Decided: the paper does not say how it takes the maximum. Here requests begin at intervals of
    *step*, tokens over throughput, and the lengths of answers are independent. The request k places
    before the last request has k · step more time for its decode. So P(all requests are done x
    seconds after the turn of the last request) is the product of P(D <= x + k · step) over k. The
    model neglects that the tokens of an answer slightly delay later requests.
    """
    if not np.all(work.num_requests >= 1):
        raise ValueError("num_requests of a group must be 1 or more")
    step_s = work.tokens.mean / service.token_rate_per_s
    last_s = _last_decode(
        _decode(work.output, service),
        work.num_requests,
        step_s,
        most_s=np.asarray(work.most_output) * max(_LEAST_S, service.paced_decode_s),
    )
    before = wait.plus(_prefill(service))
    begun_s = TimeDistribution(before.mean_s[..., np.newaxis], before.variance[..., np.newaxis])
    sums = begun_s.quantile(_LEVELS)[..., :, np.newaxis] + last_s[..., np.newaxis, :]
    flat = np.sort(sums.reshape(*sums.shape[:-2], _POINTS * _POINTS), axis=-1)
    return GroupCompletion(flat.reshape(*flat.shape[:-1], _POINTS, _POINTS).mean(axis=-1))


def _prefill(service: ServiceParameters) -> TimeDistribution:
    return TimeDistribution.of(service.prefill_s, service.prefill_var)


def _decode(output: TokenMoments, service: ServiceParameters) -> TimeDistribution:
    """Decode time D of an answer, by equation 4 of QLM."""
    pace_s = service.paced_decode_s
    return TimeDistribution.of(output.mean * pace_s, output.variance * pace_s**2)


def _remainder(output: TokenMoments) -> TokenMoments:
    """
    Mean and variance of the remaining tokens of a running answer, by renewal theory.

    Answers are assumed to have lognormal lengths. Longer answers are more likely to be running.
    """
    mean = np.maximum(1e-9, output.mean)
    skew = 1 + output.variance / mean**2
    return TokenMoments(mean * skew / 2, mean**2 * skew**2 * (skew / 3 - 0.25))


def _last_decode(
    decode: TimeDistribution, num_requests: Floats, step_s: Floats, *, most_s: Floats
) -> Floats:
    """
    Quantiles of the time from the start of the last request to the end of all decodes, float64[...,
    32].
    """
    parts = (decode.log_median, decode.log_sd, num_requests, step_s, most_s)
    shape = np.broadcast_shapes(decode.mean_s.shape, *(np.shape(each) for each in parts))
    median, sd, count, step, most = (
        np.broadcast_to(each, shape)[..., np.newaxis] for each in parts
    )
    places, weights = _places(int(np.max(num_requests, initial=1.0)))
    scores = np.linspace(-_FAR_SD, _FAR_SD + 1.5, _GRID)
    with np.errstate(invalid="ignore"):
        grid_s = np.where(np.isfinite(median), np.exp(median + sd * scores), 0.0)
    grid_s = np.minimum(grid_s, most)
    all_done = np.zeros(grid_s.shape)
    spread = TimeDistribution(decode.mean_s[..., np.newaxis], decode.variance[..., np.newaxis])
    for place, weight in zip(places, weights, strict=True):
        share = np.clip((count - place) / weight, 0.0, 1.0) * weight
        at_s = grid_s + place * step
        done = normal_cdf(np.clip(spread.score(at_s), -8.0, 8.0))
        all_done += share * np.where(at_s >= most, 0.0, np.log(done))
    cumulative, flat = np.exp(all_done).reshape(-1, _GRID), grid_s.reshape(-1, _GRID)
    rows = zip(cumulative, flat, strict=True)
    ends = [np.interp(_LEVELS, chance, ends_s) for chance, ends_s in rows]
    return np.asarray(ends).reshape(*shape, _POINTS)


def _places(most: int) -> tuple[Floats, Floats]:
    """
    Sampled positions before the last request of a group, and the number of positions that each
    sample represents.
    """
    edges = list(range(min(most, _ALONE)))
    while edges[-1] + 1 < most:
        edges.append(min(most - 1, max(edges[-1] + 1, round(1.25 * edges[-1]))))
    places = np.array(edges, np.float64)
    weights = np.diff(np.append(places, most))
    return places, weights
