"""Scheduling policies by the names that settings use; the same for every backend."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.contracts.base import RequestId, Seconds
from solver.scheduling.baselines import FixedChunkEdf, FixedChunkFcfs, FixedChunkSrpf
from solver.scheduling.decision import SchedulingPolicy
from solver.scheduling.entry import Rank
from solver.scheduling.latency import LatencyTable
from solver.scheduling.options import DEFAULT, SchedulingOptions
from solver.scheduling.qoserve import QoServePolicy

PolicyName = Literal["fcfs", "edf", "srpf", "qoserve"]
"""
Who goes next: first come first served, earliest deadline, shortest prompt, each with a fixed
chunk; or `qoserve`: deadlines and work together, chunks as large as the running decodes allow,
late work last.
"""
UNLIMITED_TOKENS = 1 << 40
"""
Free KV as a policy is told after an iteration that computed nothing.

It had chosen what the engine could not start. It then offers its first choice whatever it needs,
and the engine decides.
"""
_ASSUMED_BLOCK_TOKENS = 16
"""What policies add to a request's tokens, since KV comes in blocks."""
PositiveSeconds = Annotated[float, Meta(gt=0)]


class SchedulingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What operators may want other in the `qoserve` policy; the fixed-chunk ones ignore it."""

    max_chunk_tokens: Annotated[int, Meta(ge=1)] = DEFAULT.max_chunk_tokens
    """Tokens of one iteration at most, decodes included; the engine's budget goes first."""
    low_work_weight_s_per_token: Annotated[float, Meta(ge=0)] = DEFAULT.low_work_weight_s_per_token
    """Delay per token of work still to do, while little waits: 0 is plain earliest deadline."""
    high_work_weight_s_per_token: Annotated[float, Meta(ge=0)] = (
        DEFAULT.high_work_weight_s_per_token
    )
    """And while much waits: more sheds long requests first."""
    latency_margin: Annotated[float, Meta(ge=0, lt=1)] = DEFAULT.latency_margin
    """Share of the time until the next token is due that is left for errors of prediction."""
    iteration_limit_s: PositiveSeconds | None = None
    """Longest iteration while interactive requests are decoding; none is their targets'."""
    aging_bound_s: PositiveSeconds = 600.0
    """Age from which on best-effort and late work gets a share whatever else waits."""

    def __post_init__(self) -> None:
        if self.low_work_weight_s_per_token > self.high_work_weight_s_per_token:
            raise ValueError("low_work_weight_s_per_token is above high_work_weight_s_per_token")

    def options(self) -> SchedulingOptions:
        """The policy's options."""
        limit_s: Seconds = inf if self.iteration_limit_s is None else self.iteration_limit_s
        return replace(
            DEFAULT,
            max_chunk_tokens=self.max_chunk_tokens,
            low_work_weight_s_per_token=self.low_work_weight_s_per_token,
            high_work_weight_s_per_token=self.high_work_weight_s_per_token,
            latency_margin=self.latency_margin,
            iteration_limit_s=limit_s,
            aging_bound_s=self.aging_bound_s,
        )


_FIXED_CHUNK: dict[str, Callable[[int], SchedulingPolicy]] = {
    "fcfs": FixedChunkFcfs,
    "edf": FixedChunkEdf,
    "srpf": FixedChunkSrpf,
}


def create_policy(
    name: PolicyName, latency: LatencyTable, settings: SchedulingSettings
) -> SchedulingPolicy:
    """
    A new policy for one engine.

    Args:
        name: Which.
        latency: Of the engine; covers its largest token budget.
        settings: Of `qoserve`.
    """
    fixed = _FIXED_CHUNK.get(name)
    if fixed is not None:
        return fixed(latency.max_tokens)
    options = settings.options()
    return QoServePolicy(
        latency,
        replace(options, max_chunk_tokens=min(options.max_chunk_tokens, latency.max_tokens)),
    )


def free_tokens(num_free_blocks: int, block_tokens: int) -> int:
    """Free KV as a policy is told: a prompt that fits by its count fits in whole blocks, too."""
    rounding = max(0, block_tokens - _ASSUMED_BLOCK_TOKENS)
    return max(0, num_free_blocks * block_tokens - rounding)


def is_relegated(policy: SchedulingPolicy, request_id: RequestId) -> bool:
    """Whether *policy* has given a known request up as late."""
    return isinstance(policy, QoServePolicy) and policy.rank(request_id) is Rank.RELEGATED
