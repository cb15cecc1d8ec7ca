"""Scheduling policies by name: Headway's, its ablations, and the baselines of the papers."""

from collections.abc import Callable

from ops.baselines.scheduling.co_serving import NonPreemptive, SarathiPreemptive
from ops.baselines.scheduling.polyserve import PolyServe
from ops.baselines.scheduling.shrinking_chunk import ShrinkingChunk
from services.agent.backends.policies import added_policy
from shared.runtime import extensions
from solver.scheduling.baselines import FixedChunkEdf, FixedChunkFcfs, FixedChunkSjf, FixedChunkSrpf
from solver.scheduling.engine.decision import SchedulingPolicy
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import VARIANTS
from solver.scheduling.engine.qoserve import QoServePolicy

PolicyFactory = Callable[[LatencyTable], SchedulingPolicy]

_FIXED: dict[str, Callable[[int], SchedulingPolicy]] = {
    "sarathi-fcfs": FixedChunkFcfs,
    "sarathi-edf": FixedChunkEdf,
    "sarathi-srpf": FixedChunkSrpf,
    "sarathi-sjf": FixedChunkSjf,
    "sarathi-preemptive": SarathiPreemptive,
    "non-preemptive": NonPreemptive,
}
_CHUNK_TOKENS = 256
"""Largest chunk in tokens with which an iteration keeps a TBT of 50 ms (QoServe §4)."""
_BIN_S = 0.05


def policy_factory(name: str) -> PolicyFactory:
    """
    Factory of the policy called *name*.

    `sarathi-*` and `non-preemptive` accept a chunk size after a colon: `sarathi-fcfs:2048`.
    `polyserve` accepts the TBT of its bin in milliseconds: `polyserve:100`. Policies of installed
    packages have the names of their entry points.

    Raises:
        ValueError: There is no policy of that name.
    """
    if name in VARIANTS:
        return lambda latency: QoServePolicy(latency, VARIANTS[name])
    if name == "shrinking":
        return lambda latency: ShrinkingChunk(latency, limit_s=0.05)
    kind, _, chunk = name.partition(":")
    if kind == "polyserve" and (chunk.isdigit() or not chunk):
        bin_s = int(chunk) / 1000 if chunk else _BIN_S
        return lambda latency: PolyServe(latency, bin_s=bin_s)
    if kind in _FIXED and (chunk.isdigit() or not chunk):
        tokens = int(chunk) if chunk else _CHUNK_TOKENS
        return lambda _latency: _FIXED[kind](tokens)
    if name in extensions.names(extensions.POLICIES):
        return lambda latency: added_policy(name, latency)
    raise ValueError(f"no policy {name!r}; known: {', '.join(policy_names())}")


def policy_names() -> list[str]:
    """Names of all scheduling policies, also of installed packages, without chunk sizes."""
    added = extensions.names(extensions.POLICIES)
    return sorted({*VARIANTS, *_FIXED, "polyserve", "shrinking", *added})
