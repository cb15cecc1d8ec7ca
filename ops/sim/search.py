"""Searches over simulations for the fewest replicas and for the highest rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass

_FLOOR = 100.0
"""Limit of the factor between a share of violations and the allowed share, for interpolation."""
_STEP = 0.04
"""First step of the search from the expected rate, as a share of the rate; later steps double."""
_AIM = 0.45
"""Distance of probes from the expected result, as a share of the tolerance."""


def least_replicas(violations: Callable[[int], float], *, allowed: float, most: int) -> int | None:
    """
    Fewest replicas whose share of violations is allowed; None if *most* are not enough.

    Args:
        violations: Number of replicas -> share of violations; assumed not to rise.
        allowed: Largest share of violations.
        most: Upper end of the search.
    """
    low, high = 0, 1
    while violations(high) > allowed:
        if high >= most:
            return None
        low, high = high, min(most, high * 2)
    while low + 1 < high:
        middle = (low + high) // 2
        if violations(middle) <= allowed:
            high = middle
        else:
            low = middle
    return high


def highest_rate(
    violations: Callable[[float], float],
    *,
    allowed: float,
    low_rps: float,
    high_rps: float,
    tolerance_rps: float,
    start_rps: float | None = None,
) -> float:
    """
    Goodput: the highest rate whose share of violations is allowed.

    Args:
        violations: Rate -> share of violations; assumed not to fall. The result depends only on
            whether shares are above *allowed*; the distance from *allowed* guides the search.
        allowed: Largest share of violations.
        low_rps: A rate that is known, or assumed, to be good.
        high_rps: Upper end of the search.
        tolerance_rps: Tolerance of the result.
        start_rps: Expected result.

    Returns:
        A tried rate whose share is allowed, with a tried rate at most *tolerance_rps* higher
        whose share is not; *high_rps* if its share is allowed; *low_rps* if no tried rate's is.
    """
    far = math.log(_FLOOR)
    bracket = _Bracket(_Probe(low_rps, -far), _Probe(high_rps, far))
    is_high_tried = False

    def tried(rate_rps: float) -> bool:
        nonlocal is_high_tried
        is_high_tried |= rate_rps == high_rps
        excess = _excess(violations(rate_rps), allowed)
        bracket.narrow(_Probe(rate_rps, excess))
        return excess <= 0

    if start_rps is not None:
        _surround(tried, start_rps, low_rps, high_rps)
    while (width := bracket.width_rps) > tolerance_rps:
        tried(bracket.next_rps(tolerance_rps))
        # If interpolation narrows the bracket by less than half, halve the bracket.
        if bracket.width_rps > max(tolerance_rps, width / 2):
            tried((bracket.good.rate_rps + bracket.bad.rate_rps) / 2)
    if bracket.bad.rate_rps == high_rps and not is_high_tried:
        tried(high_rps)
    return bracket.good.rate_rps


@dataclass(frozen=True, slots=True)
class _Probe:
    """A rate that the search has tried, with the result."""

    rate_rps: float
    excess: float
    """Logarithm of the ratio of the share of violations to the allowed share; at most 0 is good."""


@dataclass(slots=True)
class _Bracket:
    """Bracket of a search: the highest good rate and the lowest bad rate."""

    good: _Probe
    bad: _Probe

    @property
    def width_rps(self) -> float:
        return self.bad.rate_rps - self.good.rate_rps

    def narrow(self, probe: _Probe) -> None:
        """Replace an end of the bracket by *probe*."""
        if probe.excess > 0:
            self.bad = probe
        else:
            self.good = probe

    def next_rps(self, tolerance_rps: float) -> float:
        """
        A rate close to the expected crossing of the allowed share, on the bracket's longer side.
        """
        good, bad = self.good, self.bad
        if self.width_rps <= 2 * tolerance_rps:
            return (good.rate_rps + bad.rate_rps) / 2
        expected = good.rate_rps + self.width_rps * good.excess / (good.excess - bad.excess)
        aim = _AIM * tolerance_rps
        beside = expected - good.rate_rps > bad.rate_rps - expected
        wanted = expected - aim if beside else expected + aim
        margin = min(2 * aim, self.width_rps / 4)
        return min(bad.rate_rps - margin, max(good.rate_rps + margin, wanted))


def _surround(
    tried: Callable[[float], bool], start_rps: float, low_rps: float, high_rps: float
) -> None:
    """Try rates away from *start_rps* until the result changes or the range ends."""
    rate_rps, step = min(start_rps, high_rps), _STEP
    if tried(rate_rps):
        while rate_rps < high_rps:
            rate_rps, step = min(high_rps, rate_rps * (1 + step)), 2 * step
            if not tried(rate_rps):
                return
        return
    while step < 1 and (rate_rps := rate_rps * (1 - step)) > low_rps and not tried(rate_rps):
        step *= 2


def _excess(share: float, allowed: float) -> float:
    if allowed <= 0:
        return math.log(_FLOOR) if share > 0 else -math.log(_FLOOR)
    return min(math.log(_FLOOR), math.log(max(share / allowed, 1 / _FLOOR)))
