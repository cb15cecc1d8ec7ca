"""SLO misses, latencies and costs in the result of a simulation."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ops.sim.cluster import Outcome
from ops.sim.request import SimRequest
from shared.contracts.base import Seconds
from shared.contracts.qos import Importance


def violation_share(requests: Sequence[SimRequest]) -> float:
    """Share of requests that missed their SLO; 0 if there are no requests."""
    return sum(r.violated for r in requests) / len(requests) if requests else 0.0


def summarize(outcome: Outcome) -> dict[str, Any]:
    """All figures of a simulation, JSON-able."""
    requests = outcome.requests
    by_class: dict[str, list[SimRequest]] = {}
    for request in requests:
        by_class.setdefault(request.arrival.class_name, []).append(request)
    long, short = _by_length(requests)
    duration_s = max((r.arrival.arrived_at for r in requests), default=0.0)
    kept = sum(not r.violated for r in requests)
    iterations = sum(t.num_iterations for t in outcome.totals)
    tokens = sum(t.tokens for t in outcome.totals)
    return {
        "requests": len(requests),
        "finished": sum(r.finished_at is not None for r in requests),
        "violations": violation_share(requests),
        "important_violations": violation_share(
            [r for r in requests if r.arrival.importance is Importance.HIGH]
        ),
        "long_violations": violation_share(long),
        "short_violations": violation_share(short),
        "latency_s": latency_quantiles(requests),
        "goodput_rps": kept / duration_s if duration_s else 0.0,
        "utilization": sum(t.busy_s for t in outcome.totals) / max(1e-9, outcome.simulated_s),
        "tokens_per_iteration": tokens / max(1, iterations),
        "preempted": sum(t.num_preempted for t in outcome.totals),
        "wasted_token_share": sum(t.wasted_tokens for t in outcome.totals) / max(1, tokens),
        "pace": pace(requests),
        "classes": {name: _class_figures(members) for name, members in sorted(by_class.items())},
        "simulated_s": outcome.simulated_s,
        "cpu_s": outcome.cpu_s,
        "speed": outcome.simulated_s / max(1e-9, outcome.cpu_s),
    }


def pace(requests: Iterable[SimRequest]) -> dict[str, float]:
    """
    Token pace of interactive requests.

    `late` is the share of late tokens (eq. 2) of requests whose first token was in time, `late_all`
    that of all requests. `gaps` is the share of gaps above the TBT target, of requests whose first
    token was in time.
    """
    interactive = [r for r in requests if r.interactive]
    kept = [r for r in interactive if not r.violated]
    kept_tokens = sum(r.num_output_tokens for r in kept)
    all_tokens = sum(r.num_output_tokens for r in interactive)
    gaps = sum(max(0, r.num_output_tokens - 1) for r in kept)
    return {
        "late": sum(r.late_tokens for r in kept) / max(1, kept_tokens),
        "late_all": sum(r.late_tokens for r in interactive) / max(1, all_tokens),
        "gaps": sum(r.num_gaps_over for r in kept) / max(1, gaps),
    }


def latency_s(request: SimRequest) -> Seconds:
    """TTFT of an interactive request, TTLT of other requests; infinite if this token is missing."""
    done_at = request.first_token_at if request.interactive else request.finished_at
    return math.inf if done_at is None else done_at - request.arrival.arrived_at


def latency_quantiles(requests: Sequence[SimRequest]) -> dict[str, float | None] | None:
    """
    Quantiles p50, p95 and p99 of `latency_s`, including unserved requests; None means infinite.
    """
    if not requests:
        return None
    latencies = [latency_s(r) for r in requests]
    # Quantiles are values of actual requests, because finite and infinite values cannot be
    # interpolated.
    values = np.quantile(latencies, [0.5, 0.95, 0.99], method="higher")
    return {
        name: float(value) if math.isfinite(value) else None
        for name, value in zip(("p50", "p95", "p99"), values, strict=True)
    }


def rolling_p99(
    requests: Iterable[SimRequest], *, window_s: Seconds
) -> dict[str, dict[str, float | None]]:
    """
    Median and maximum over windows of each class's p99 `latency_s`; None means infinite.

    Decided: windows are consecutive, and a request belongs to the window of its arrival;
    QoServe Fig. 13 does not specify this.
    """
    windows: dict[str, dict[int, list[Seconds]]] = {}
    for request in requests:
        arrival = request.arrival
        members = windows.setdefault(arrival.class_name, {})
        members.setdefault(int(arrival.arrived_at // window_s), []).append(latency_s(request))
    found: dict[str, dict[str, float | None]] = {}
    for name, members in sorted(windows.items()):
        p99s = [float(np.quantile(v, 0.99, method="higher")) for v in members.values()]
        middle, largest = float(np.quantile(p99s, 0.5, method="higher")), max(p99s)
        found[name] = {
            "median": middle if math.isfinite(middle) else None,
            "max": largest if math.isfinite(largest) else None,
        }
    return found


def _by_length(
    requests: Sequence[SimRequest],
) -> tuple[list[SimRequest], list[SimRequest]]:
    """
    Requests with prompts from the 90th percentile on, and all other requests (QoServe Fig. 11).
    """
    if not requests:
        return [], []
    edge = float(np.quantile([r.arrival.prompt_tokens for r in requests], 0.9))
    return (
        [r for r in requests if r.arrival.prompt_tokens >= edge],
        [r for r in requests if r.arrival.prompt_tokens < edge],
    )


def _class_figures(members: list[SimRequest]) -> dict[str, Any]:
    return {
        "requests": len(members),
        "violations": violation_share(members),
        "latency_s": latency_quantiles(members),
        "ttft_s": _quantiles(
            [r.first_token_at - r.arrival.arrived_at for r in members if r.first_token_at]
        ),
        "ttlt_s": _quantiles(
            [r.finished_at - r.arrival.arrived_at for r in members if r.finished_at]
        ),
        "mean_tbt_s": _quantiles(
            [
                (r.last_token_at - r.first_token_at) / (r.num_output_tokens - 1)
                for r in members
                if r.first_token_at and r.num_output_tokens > 1
            ]
        ),
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p95, p99 = np.quantile(values, [0.5, 0.95, 0.99])
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99)}
