"""Admission of requests within the limits of the grouper, of tenants and of lanes."""

import math

from services.planner.settings import GrouperSettings
from services.planner.state import GrouperState
from shared.contracts.base import UnixTime
from shared.contracts.errors import CapacityError
from shared.contracts.requests import QueuedRequest
from solver.planning.forecast import late_with, retry_after_s
from solver.scheduling.window import tokens_needed

RETRY_AFTER_S = 5.0
"""Retry delay that a refusal reports if no better estimate exists."""


def check_admission(
    request: QueuedRequest,
    state: GrouperState,
    settings: GrouperSettings,
    now: UnixTime,
    *,
    has_policy_limit: bool = False,
) -> None:
    """
    Admit *request*, or refuse it with a reason and a retry delay.

    Args:
        request: The request.
        state: State of the grouper.
        settings: Limits of the grouper.
        now: Unix seconds.
        has_policy_limit: True if the policy of the tenant limits its outstanding tokens over all
            groupers; the limit of the settings then does not apply.

    Raises:
        CapacityError: The total or the tenant's outstanding work exceeds its limit, or the lane is
            so full that the request would probably be late.
    """
    tokens = tokens_needed(request)
    if state.shares.total + tokens > settings.max_outstanding_tokens:
        raise CapacityError(
            f"{state.shares.total} tokens are outstanding; the limit is "
            f"{settings.max_outstanding_tokens}",
            retry_after_s=_wait_s(request, state, now),
        )
    most = settings.tenant_tokens.get(request.tenant, settings.max_tenant_tokens)
    outstanding = state.shares.outstanding(request.tenant)
    if not has_policy_limit and most is not None and outstanding + tokens > most:
        raise CapacityError(
            f"tenant {request.tenant!r} has {outstanding} tokens outstanding and requests "
            f"{tokens} more; its limit is {most}",
            retry_after_s=_wait_s(request, state, now),
        )
    _check_lane(request, state, settings, now)


def _check_lane(
    request: QueuedRequest, state: GrouperState, settings: GrouperSettings, now: UnixTime
) -> None:
    left_s = request.slo.planning_deadline_at(request.arrived_at) - now
    if settings.refuse_late_from is None or left_s == math.inf:
        return
    forecast = state.forecast(request.lane, now)
    if forecast is None or (forecast.wait_s is not None and forecast.wait_s <= forecast.request_s):
        return  # This request would be served next, so the length of the lane cannot make it late.
    late = late_with(forecast, left_s)
    if late >= settings.refuse_late_from:
        raise CapacityError(
            f"lane {request.lane} is full: a request that arrives now is late with probability "
            f"{late:.2f}; the limit is {settings.refuse_late_from}",
            retry_after_s=retry_after_s(forecast, left_s),
        )


def _wait_s(request: QueuedRequest, state: GrouperState, now: UnixTime) -> float:
    """Predicted time until the lane has served its current work; a default without a forecast."""
    forecast = state.forecast(request.lane, now)
    return RETRY_AFTER_S if forecast is None else max(1.0, retry_after_s(forecast, 0.0))
