"""Whether it serves urgent requests that an instance holds work back while slots are free."""

import math
from collections import deque
from dataclasses import dataclass, field

from shared.contracts.base import Seconds, UnixTime

TRIAL_PERIOD_S: Seconds = 120.0
"""Time from one trial to the next; trials of all instances are at the same times."""
TRIAL_S: Seconds = 5.0
"""Duration of a trial."""
_TRIAL_AT_S: Seconds = 60.0
"""Time of the first trial after a multiple of the period."""
_MOST_DOUBLINGS = 3
"""Number of times by which the period doubles at most, while trials change nothing."""
_SETTLE_S: Seconds = 10.0
"""Time after a change in which arrivals still meet the work that began before it."""
_LEAST_LATE = 0.05
"""Share of late requests from which trials are made."""
_LEAST_REQUESTS, _ENOUGH_REQUESTS = 10, 40
"""
Number of requests in each arm from which a clear difference decides, and from which a small one
does.
"""
_CLEAR, _EQUAL = 2.0, 0.5
"""
Differences of the shares in time, in standard errors: that which decides, and that up to which they
are equal.
"""
_SOONER = 0.9
"""Ratio of the mean times to the first token that decides between equal shares."""
_RECENT = 1 / 50
"""Weight of the last request in the share of late requests."""
_FADING = 0.5
"""Share of its weight that what was seen keeps once it has decided."""
_REMEMBERED = 16


@dataclass(slots=True)
class Arm:
    """Urgent requests that came while work was held, or while it was passed on."""

    requests: float = 0.0
    in_time: float = 0.0
    first_s: Seconds = 0.0
    """Sum of the times to the first tokens."""

    @property
    def share(self) -> float:
        """Share in time."""
        return self.in_time / self.requests if self.requests else 0.0

    @property
    def mean_first_s(self) -> Seconds:
        return self.first_s / self.requests if self.requests else math.inf

    @property
    def variance(self) -> float:
        """Variance of `share`, by Laplace's rule, so that few requests do not count as certain."""
        share = (self.in_time + 1.0) / (self.requests + 2.0)
        return share * (1.0 - share) / (self.requests + 2.0)

    def add(self, first_s: Seconds, *, in_time: bool) -> None:
        """Count one request."""
        self.requests += 1.0
        self.in_time += in_time
        self.first_s += first_s

    def fade(self) -> None:
        """Reduce the weight of what was seen."""
        self.requests *= _FADING
        self.in_time *= _FADING
        self.first_s *= _FADING


@dataclass(slots=True)
class Holding:
    """
    Compares holding with passing on the same traffic, and keeps what serves urgent requests better.

    Holding: work that can wait leaves slots free, and no request goes to a server with much to
    prefill. Passing: each request begins while a slot is free. While many urgent requests are late,
    the other way is tried for short times; the longer it is worse, the less often.
    """

    passes: bool = False
    """True if requests are passed on now."""
    prefers_passing: bool = False
    """True if requests are passed on outside trials."""
    arms: dict[bool, Arm] = field(default_factory=lambda: {False: Arm(), True: Arm()})
    """True: while requests were passed on."""
    _late: float = 0.0
    """Share of late requests, of late."""
    doublings: int = 0
    """Number of times that the period of trials has doubled."""
    _changes: deque[tuple[UnixTime, bool]] = field(
        default_factory=lambda: deque([(-math.inf, False)], _REMEMBERED)
    )
    """Times from which requests were passed on or held."""
    _compare_at: UnixTime = math.inf

    def look(self, now: UnixTime) -> bool:
        """
        Begin and end trials; return True if the preference has changed.

        Args:
            now: Unix seconds; never less than at the last call.
        """
        trying = self._is_trial(now) and (self._is_trying or self._late > _LEAST_LATE)
        if self._is_trying and not trying:
            self._compare_at = now + _SETTLE_S
        changed = False
        if now >= self._compare_at:
            self._compare_at = math.inf
            changed = self._compared()
        self._pass(trying != self.prefers_passing, now)
        return changed

    def served(self, arrived_at: UnixTime, first_s: Seconds, *, in_time: bool) -> None:
        """
        Record an urgent request whose first token has come, or will be late.

        Args:
            arrived_at: Time of its arrival.
            first_s: Time from its arrival to its first token, or until now.
            in_time: True if the first token met its target.
        """
        self._late += ((not in_time) - self._late) * _RECENT
        known = (each for each in reversed(self._changes) if each[0] <= arrived_at)
        since, passes = next(known, (math.inf, self.prefers_passing))
        # Arrivals of a trial count all, since it is shorter than the time to settle. Those from
        # before the remembered changes count nowhere.
        if passes != self.prefers_passing or arrived_at - since >= _SETTLE_S:
            self.arms[passes].add(first_s, in_time=in_time)

    @property
    def reason(self) -> str:
        """Why requests are passed on, for their stories."""
        if not self.prefers_passing:
            return "for a trial, since many first tokens are late"
        return f"since holding did not help: {self.compared}"

    @property
    def compared(self) -> str:
        """What was seen of both ways."""
        held, passed = (self.arms[passes] for passes in (False, True))
        return (
            f"{held.share:.0%} of first tokens in time after {held.mean_first_s:.2f} s, "
            f"{passed.share:.0%} after {passed.mean_first_s:.2f} s without it"
        )

    @property
    def _is_trying(self) -> bool:
        return self.passes != self.prefers_passing

    def _is_trial(self, now: UnixTime) -> bool:
        number, at_s = divmod(now - _TRIAL_AT_S, TRIAL_PERIOD_S)
        return at_s < TRIAL_S and number % (1 << self.doublings) == 0

    def _compared(self) -> bool:
        """Change the preference if the other way is better; return whether it is."""
        ours, other = (self.arms[passes != self.prefers_passing] for passes in (False, True))
        least = min(ours.requests, other.requests)
        more = other.share - ours.share
        error = math.sqrt(ours.variance + other.variance)
        is_clear = abs(more) > _CLEAR * error
        if least < (_LEAST_REQUESTS if is_clear else _ENOUGH_REQUESTS):
            return False
        is_sooner = more > -_EQUAL * error and other.mean_first_s < _SOONER * ours.mean_first_s
        changes = is_sooner or (is_clear and more > 0)
        for arm in self.arms.values():
            arm.fade()
        if changes:
            self.prefers_passing = not self.prefers_passing
        self.doublings = 0 if changes else min(_MOST_DOUBLINGS, self.doublings + 1)
        return changes

    def _pass(self, passes: bool, now: UnixTime) -> None:  # noqa: FBT001 - its only argument
        if passes != self.passes:
            self.passes = passes
            self._changes.append((now, passes))
