"""How many replicas, and how much load: searches over simulations."""

from collections.abc import Callable


def least_replicas(violations: Callable[[int], float], *, allowed: float, most: int) -> int | None:
    """
    Fewest replicas whose share of violations is allowed; None if *most* are not enough.

    Args:
        violations: Of a number of replicas; assumed not to rise with it.
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
) -> float:
    """
    Goodput: the highest rate whose share of violations is allowed, by bisection.

    Args:
        violations: At a rate; assumed not to fall with it.
        allowed: Largest share of violations.
        low_rps: A rate that is known, or taken, to be good.
        high_rps: One that is too high.
        tolerance_rps: How near the answer lies.
    """
    while high_rps - low_rps > tolerance_rps:
        middle = (low_rps + high_rps) / 2
        if violations(middle) <= allowed:
            low_rps = middle
        else:
            high_rps = middle
    return low_rps
