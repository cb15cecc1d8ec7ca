"""Summary of a simulated mesh: outcomes of requests, and costs."""

from collections.abc import Sequence
from typing import Any

from ops.sim.mesh.cluster import MeshOutcome
from ops.sim.mesh.request import MeshRequest
from shared.contracts.base import Seconds

WARM_UP_SHARE = 0.25
"""Warm-up, in which throughput is not counted, as a share of the duration of arrivals."""


def attainment(requests: Sequence[MeshRequest]) -> float:
    """Share of requests that ended before their deadline; 1 if there are no requests."""
    return sum(not r.violated for r in requests) / len(requests) if requests else 1.0


def throughput_rps(requests: Sequence[MeshRequest], *, begin_s: Seconds, end_s: Seconds) -> float:
    """Requests per second that ended from *begin_s* to *end_s*."""
    ended = [r for r in requests if r.finished_at is not None and begin_s <= r.finished_at < end_s]
    return len(ended) / (end_s - begin_s)


def summarize_mesh(
    outcome: MeshOutcome, *, num_instances: int, duration_s: Seconds
) -> dict[str, Any]:
    """All figures of a simulated mesh, JSON-able; *duration_s* is the duration of the arrivals."""
    requests = outcome.requests
    instance_s = max(1e-9, num_instances * outcome.end_s)
    begin_s = WARM_UP_SHARE * duration_s
    classes = sorted({r.arrival.class_name for r in requests})
    return {
        "requests": len(requests),
        "attainment": attainment(requests),
        "classes": {
            name: attainment([r for r in requests if r.arrival.class_name == name])
            for name in classes
        },
        "throughput_rps": throughput_rps(requests, begin_s=begin_s, end_s=duration_s),
        "drained_s": outcome.end_s,
        "swaps": outcome.num_swaps,
        "evicted": sum(r.num_evicted for r in requests),
        "swapped_out": sum(r.num_swapped for r in requests),
        "preempted": sum(r.num_preempted for r in requests),
        "relegated": sum(r.relegated for r in requests),
        "busy": outcome.busy_s / instance_s,
        "kv_used": outcome.kv_share_s / instance_s,
        "wasted_token_share": outcome.wasted_tokens / max(1, outcome.tokens),
        "longest_idle_s": outcome.idle.longest_s,
        "longest_idle_swaps": outcome.idle.longest_swaps,
        "plans": outcome.num_plans,
        "plan_ms": 1000 * outcome.plan_cpu_s / max(1, outcome.num_plans),
        "cpu_s": outcome.cpu_s,
    }
