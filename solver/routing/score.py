"""What a request's first token would cost where (QUARTZ §3.3)."""

from shared.contracts.base import Seconds

PRESSURE_FROM = 0.9
"""KV utilization below which an engine hardly ever has to wait for memory."""
PRESSURE_S = 2.0
"""Penalty of an engine without free KV: a request then waits until some decode ends."""


def routing_score_s(
    *, expected_wait_s: Seconds, prefill_quantile_s: Seconds, pressure_s: Seconds
) -> Seconds:
    """
    A conservative time to the first token: smaller is better.

    Source: QUARTZ eq. 4. The wait is a mean, since quantiles do not add up; only this request's
    own prefill counts at its quantile.
    """
    return expected_wait_s + prefill_quantile_s + pressure_s


def pressure_penalty_s(kv_utilization: float) -> Seconds:
    """
    Penalty in seconds for an engine with little free KV; never falls as utilization rises.

    Source: QUARTZ §3.3, psi.
    Decided: the paper gives no formula. None up to `PRESSURE_FROM`, from there in proportion up
    to `PRESSURE_S` at 1.
    """
    excess = min(1.0, kv_utilization) - PRESSURE_FROM
    return PRESSURE_S * max(0.0, excess) / (1.0 - PRESSURE_FROM)
