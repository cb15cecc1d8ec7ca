"""Outcomes of the requests behind a router."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ops.sim.routing.cluster import RoutingOutcome
from ops.sim.routing.engine import RoutedSimRequest
from shared.contracts.base import Seconds, TenantId

LONG_TOKENS = 3000
"""Number of computed prompt tokens from which a request counts as long."""


def summarize_routing(outcome: RoutingOutcome) -> dict[str, Any]:
    """All figures of a routing simulation, JSON-able; times in seconds, shares 0..1."""
    requests = outcome.requests
    times = [ttft_s(request, outcome) for request in requests]
    tokens = sum(r.arrival.prompt_tokens + r.num_output_tokens for r in requests)
    return {
        "p50_s": float(np.quantile(times, 0.5)),
        "p95_s": float(np.quantile(times, 0.95)),
        "p99_s": float(np.quantile(times, 0.99)),
        "violations": sum(r.violated for r in requests) / len(requests),
        "max_wait_s": max(wait_s(request, outcome) for request in requests),
        "throughput_tps": tokens / outcome.end_s,
        "hits": sum(r.cached_tokens for r in requests)
        / sum(r.arrival.prompt_tokens for r in requests),
        "long_slowdown": long_slowdown(outcome),
        "jain": jain(list(normalised_service(requests).values())),
        "preempted": sum(r.num_preempted for r in requests),
        "fallback_share": float(np.mean([fallen for _, fallen in outcome.fallen_back])),
        "violations_by_class": _violations_by_class(requests),
        "violations_by_tenant": _violations_by_tenant(requests),
    }


def ttft_s(request: RoutedSimRequest, outcome: RoutingOutcome) -> Seconds:
    """TTFT of a request; without a first token, the time to the end of the simulation."""
    at = outcome.end_s if request.first_token_at is None else request.first_token_at
    return at - request.arrival.arrived_at


def wait_s(request: RoutedSimRequest, outcome: RoutingOutcome) -> Seconds:
    """
    Time from arrival to the first chunk, in which the request waits in the router and in the
    engine.
    """
    at = outcome.end_s if request.scheduled_at is None else request.scheduled_at
    return at - request.arrival.arrived_at


def long_slowdown(outcome: RoutingOutcome) -> float:
    """Ratio of mean TTFT to mean prefill time of long requests; 1 if there are none."""
    longs = [
        request
        for request in outcome.requests
        if request.scheduled_at is not None
        and request.first_token_at is not None
        and request.arrival.prompt_tokens - request.cached_tokens >= LONG_TOKENS
    ]
    if not longs:
        return 1.0
    waits = sum(wait_s(request, outcome) for request in longs)
    return 1 + waits / (sum(ttft_s(request, outcome) for request in longs) - waits)


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index: 1 if all of n values are equal, 1/n if only one is above 0."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def normalised_service(requests: Sequence[RoutedSimRequest]) -> dict[TenantId, float]:
    """
    Prompt tokens served in time, divided by the max-min fair share, for each tenant.

    Decided: the paper does not define its index. The index here counts service in time, because
    every tenant is served in the end and only service in time is scarce. A tenant that requests
    less than an equal share is entitled to all its tokens; other tenants share the remainder.
    """
    asked: dict[TenantId, float] = {}
    served: dict[TenantId, float] = {}
    for request in requests:
        tenant, tokens = request.asked.tenant, request.arrival.prompt_tokens
        asked[tenant] = asked.get(tenant, 0.0) + tokens
        served[tenant] = served.get(tenant, 0.0) + (0 if request.violated else tokens)
    shares = max_min_shares(asked, sum(served.values()))
    return {tenant: served[tenant] / max(1e-9, shares[tenant]) for tenant in asked}


def max_min_shares(asked: Mapping[TenantId, float], total: float) -> dict[TenantId, float]:
    """Max-min fair division of *total* among tenants with the given demands."""
    shares: dict[TenantId, float] = {}
    left = total
    for number, tenant in enumerate(sorted(asked, key=lambda each: asked[each])):
        shares[tenant] = min(asked[tenant], left / (len(asked) - number))
        left -= shares[tenant]
    return shares


def _violations_by_class(requests: Sequence[RoutedSimRequest]) -> dict[str, float]:
    names = sorted({request.arrival.class_name for request in requests})
    return {
        name: _violations([r for r in requests if r.arrival.class_name == name]) for name in names
    }


def _violations_by_tenant(requests: Sequence[RoutedSimRequest]) -> dict[str, float]:
    names = sorted({request.asked.tenant for request in requests})
    return {name: _violations([r for r in requests if r.asked.tenant == name]) for name in names}


def _violations(requests: Sequence[RoutedSimRequest]) -> float:
    return sum(request.violated for request in requests) / len(requests)
