"""Instances with a changing virtual queue, with defaults for irrelevant fields."""

from dataclasses import replace
from typing import Any

from shared.contracts.base import ModelName, RequestId
from shared.contracts.estimates import LatencyCoefficients
from shared.contracts.plans import LaneQuota, Segment
from solver.planning.lso.evict_or_swap import KvCosts
from solver.planning.lso.situation import RunningWork, Situation

A, B, C, D = (ModelName(name) for name in "abcd")
EVICTS = KvCosts(
    latency=LatencyCoefficients(constant_s=0.01, linear_s=1e-3),
    bytes_per_token=1000,
    transfer_bytes_per_s=1e9,
    host_checkpoints=False,
)
SWAPS = replace(EVICTS, host_checkpoints=True)


def segment(model: ModelName, *lanes: str) -> Segment:
    return Segment(model=model, lanes=tuple(LaneQuota(lane=lane, quota=1) for lane in lanes))


def running(name: str, lane: str = "x", tokens: int = 100, **fields: Any) -> RunningWork:
    values: dict[str, Any] = {"context_tokens": tokens, "held_tokens": tokens, "remaining_s": 1.0}
    return RunningWork(request_id=RequestId(name), lane=lane, **(values | fields))


def situation(**fields: Any) -> Situation:
    values: dict[str, Any] = {
        "active": A,
        "costs": EVICTS,
        "free_tokens": 1000,
        "free_slots": 8,
        "host_kv_free_bytes": 1 << 40,
        "drain_limit_s": 5.0,
    }
    return Situation(**(values | fields))
