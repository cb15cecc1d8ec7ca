"""
CPU time and memory of planning, from individual requests to lanes, groups and a plan.

`python -m ops.bench.planner_published SEED` prints the figures as JSON. The module imports only
what the leader and its plan worker import, so that the measured memory is representative.
"""

import resource
import sys
import time
from typing import Any

import msgspec
import numpy as np

from services.planner.lane_totals import LaneCounter
from services.planner.leader.snapshot_builder import cluster_snapshot
from services.planner.settings import LeaderSettings
from services.planner.state import LeaderState
from shared.contracts.base import InstanceId, ModelName, RequestId, TenantId
from shared.contracts.estimates import LatencyCoefficients, Profile
from shared.contracts.lanes import LaneLayout
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import ModelRef, QueuedRequest, Sampling
from shared.contracts.telemetry import InstanceStatus, LanesObserved, ModelState, Residency
from solver.planning.lanes import lane_for
from solver.planning.problem.snapshot import ClusterSnapshot
from solver.planning.review import ReviewOptions, review
from solver.planning.search.loading import compile_kernels

NUM_REQUESTS, NUM_INSTANCES, NUM_MODELS = 400_000, 50, 8
NOW = 1_000_000.0
_OVER_S = 600.0
"""Time span in which the requests arrived."""
LAYOUT = LaneLayout()
_ENGINE, _DEVICE = "vllm", "A100"
_CHAT, _SOON, _LATE = Slo(ttft_s=30.0), Slo(ttlt_s=900.0), Slo(ttlt_s=3600.0)
_SLOS = ((_CHAT, 0.01), (_SOON, 0.29), (_LATE, 0.7))
"""SLOs and their shares of the requests; requests with the chat SLO have just arrived."""


def counted(seed: int, num_requests: int) -> LeaderState:
    """The leader's state after a grouper has put *num_requests* requests into lanes, one by one."""
    random = np.random.default_rng(seed)
    share = 1 / np.arange(1, NUM_MODELS + 1) ** 1.2
    models = random.choice(NUM_MODELS, num_requests, p=share / share.sum()).tolist()
    slos = random.choice(len(_SLOS), num_requests, p=[part for _, part in _SLOS]).tolist()
    ages_s = np.sort(random.uniform(0.0, _OVER_S, num_requests))[::-1].tolist()
    tokens = random.integers(100, 900, (num_requests, 2)).tolist()
    counters: dict[str, LaneCounter] = {}
    for number, (model, slo, age_s, lengths) in enumerate(
        zip(models, slos, ages_s, tokens, strict=True)
    ):
        kind = _SLOS[slo][0]
        at = NOW - age_s * (_CHAT.ttft_s or 0.0) / _OVER_S if kind is _CHAT else NOW - age_s
        request = _request(number, ModelName(f"model-{model}"), kind, at, lengths)
        counters.setdefault(request.lane, LaneCounter()).add(request, at=at)
    state = LeaderState()
    state.on_lanes(
        LanesObserved(
            sender="grouper",
            incarnation="first",
            seq=1,
            at=NOW,
            layout=LAYOUT.version,
            lanes=tuple(counter.total(lane) for lane, counter in counters.items()),
        ),
        NOW,
    )
    state.waiting = {lane: counter.arrivals.total for lane, counter in counters.items()}
    for index in range(NUM_INSTANCES):
        state.on_status(_status(index), NOW)
    for model in range(NUM_MODELS):
        state.on_profile(_profile(ModelName(f"model-{model}")))
    return state


def snapshot_of(state: LeaderState) -> ClusterSnapshot:
    """The leader's snapshot of *state*."""
    return cluster_snapshot(state, layout=LAYOUT, settings=LeaderSettings(), now=NOW)


def measured(seed: int, num_requests: int) -> dict[str, Any]:
    """
    CPU times of grouping and of planning, and peak memory of this process until the end of
    planning.
    """
    compile_kernels()
    begun_s = time.process_time()
    state = counted(seed, num_requests)
    counted_s = time.process_time()
    snapshot = snapshot_of(state)
    grouped_s = time.process_time()
    settings = LeaderSettings()
    options = ReviewOptions(
        importance_weight=settings.importance_weight, budget_s=settings.solve_budget_s
    )
    found = review(snapshot, None, options=options, clock=time.thread_time, seed=seed)
    planned_s = time.process_time()
    return {
        "requests": num_requests,
        "waiting": sum(group.num_requests for group in snapshot.groups),
        "lanes": len(state.waiting),
        "groups": len(snapshot.groups),
        "planned": len(found.order.groups),
        "expected": 1 - found.cost.late_share,
        "counting_us": 1e6 * (counted_s - begun_s) / num_requests,
        "grouping_s": grouped_s - counted_s,
        "planning_s": planned_s - grouped_s,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _request(
    number: int, model: ModelName, slo: Slo, at: float, lengths: list[int]
) -> QueuedRequest:
    prompt_tokens, max_tokens = lengths
    lane = lane_for(
        model=model,
        importance=Importance.HIGH if slo is _CHAT else Importance.LOW,
        time_left_s=slo.planning_deadline_at(at) - at,
        work_tokens=prompt_tokens + max_tokens,
        layout=LAYOUT,
    )
    return QueuedRequest(
        request_id=RequestId(f"r{number}"),
        model=ModelRef(name=model, base=model),
        prompt="",
        prompt_tokens=prompt_tokens,
        sampling=Sampling(max_tokens=max_tokens),
        slo=slo,
        arrived_at=at,
        grouped_at=at,
        tenant=TenantId("tenant"),
        lane=lane.queue_name,
    )


def _status(index: int) -> InstanceStatus:
    """Status of an instance that runs up to 128 requests and can serve every model."""
    active = ModelName(f"model-{index % NUM_MODELS}")
    return InstanceStatus(
        instance_id=InstanceId(f"i{index:02}"),
        incarnation="first",
        seq=1,
        at=NOW,
        engine=_ENGINE,
        device=_DEVICE,
        model=active,
        models=tuple(
            ModelState(
                model=ModelName(f"model-{model}"),
                residency=Residency.ACTIVE if f"model-{model}" == active else Residency.WARM,
                activate_s=0.0 if f"model-{model}" == active else 2.0,
            )
            for model in range(NUM_MODELS)
        ),
        max_running=128,
        kv_capacity_tokens=400_000,
    )


def _profile(model: ModelName) -> Profile:
    return Profile(
        model=model,
        engine=_ENGINE,
        device=_DEVICE,
        version=1,
        at=NOW,
        latency=LatencyCoefficients(constant_s=0.01, linear_s=1e-4, context_s=1e-8),
        token_rate_per_s=6000.0,
    )


if __name__ == "__main__":
    figures = measured(int(sys.argv[1]), NUM_REQUESTS)
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")
