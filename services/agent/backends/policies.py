"""Scheduling policies by their names in settings; common to all backends."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from shared.contracts.base import RequestId, Seconds
from shared.runtime import extensions
from solver.scheduling.baselines import FixedChunkEdf, FixedChunkFcfs, FixedChunkSrpf
from solver.scheduling.engine.decision import SchedulingPolicy
from solver.scheduling.engine.entry import Rank
from solver.scheduling.engine.latency import LatencyTable
from solver.scheduling.engine.options import DEFAULT, SchedulingOptions
from solver.scheduling.engine.qoserve import QoServePolicy

PolicyName = Literal["fcfs", "edf", "srpf", "qoserve"]
"""
Policies of Headway; installed packages add others by entry points in the group `headway.policies`.

Order of service with a fixed chunk size: first come first served (`fcfs`), earliest deadline first
(`edf`), or shortest prompt first (`srpf`).

`qoserve` orders by deadline and remaining work, serves late requests last, and makes chunks as
large as the running decodes allow.
"""
UNLIMITED_TOKENS = 1 << 40
"""
Free KV that is reported to a policy after an iteration that computed nothing.

Such an iteration means that the engine had no room for the request that the policy selected. With
this value the policy offers its first request regardless of free KV, and the engine decides whether
the request fits.
"""
_ASSUMED_BLOCK_TOKENS = 16
"""Tokens that policies add to a request's size, since KV is allocated in blocks."""
PositiveSeconds = Annotated[float, Meta(gt=0)]


class SchedulingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the `qoserve` policy; the fixed-chunk policies ignore them."""

    max_chunk_tokens: Annotated[int, Meta(ge=1)] = DEFAULT.max_chunk_tokens
    """Maximum tokens of one iteration, decodes included; the engine's budget takes precedence."""
    low_work_weight_s_per_token: Annotated[float, Meta(ge=0)] = DEFAULT.low_work_weight_s_per_token
    """
    Delay per token of a request's remaining work under low load; 0 is plain earliest deadline
    first.
    """
    high_work_weight_s_per_token: Annotated[float, Meta(ge=0)] = (
        DEFAULT.high_work_weight_s_per_token
    )
    """
    Delay per token of a request's remaining work under high load; a larger value delays long
    requests more.
    """
    latency_margin: Annotated[float, Meta(ge=0, lt=1)] = DEFAULT.latency_margin
    """Share of the time until the next token's deadline that is reserved for prediction errors."""
    iteration_limit_s: PositiveSeconds | None = None
    """
    Longest iteration while interactive requests decode; None derives the limit from their targets.
    """
    aging_bound_s: PositiveSeconds = 600.0
    """
    Age from which best-effort and late requests get a share of each iteration regardless of load.
    """

    def __post_init__(self) -> None:
        if self.low_work_weight_s_per_token > self.high_work_weight_s_per_token:
            raise ValueError(
                "low_work_weight_s_per_token must not be above high_work_weight_s_per_token"
            )

    def options(self) -> SchedulingOptions:
        """Convert these settings to the options of the `qoserve` policy."""
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


def check_policy(name: str, *others: str) -> None:
    """
    Check that there is a policy called *name*, or that it is one of *others*.

    Raises:
        ValueError: There is none; the message lists all.
    """
    own = (*get_args(PolicyName), *others)
    if name not in own and name not in (added := extensions.names(extensions.POLICIES)):
        raise ValueError(
            f"policy {name!r} does not exist; must be one of: {', '.join((*own, *added))}. A "
            f"package adds one by an entry point in the group {extensions.POLICIES}"
        )


def create_policy(
    name: str, latency: LatencyTable, settings: SchedulingSettings
) -> SchedulingPolicy:
    """
    Create a policy for one engine.

    Args:
        name: Name of the policy in settings.
        latency: Latency table of the engine, up to its largest token budget.
        settings: Used by `qoserve` only.

    Raises:
        SettingsError: The policy of a package cannot be imported, or is not a policy.
    """
    fixed = _FIXED_CHUNK.get(name)
    if fixed is not None:
        return fixed(latency.max_tokens)
    if name not in get_args(PolicyName):
        return added_policy(name, latency)
    options = settings.options()
    return QoServePolicy(
        latency,
        replace(options, max_chunk_tokens=min(options.max_chunk_tokens, latency.max_tokens)),
    )


def check_added(name: str) -> None:
    """
    Check that the policy called *name* can be created if it is that of a package.

    Raises:
        SettingsError: It cannot be imported, or is not a policy.
    """
    if name not in get_args(PolicyName) and name in extensions.names(extensions.POLICIES):
        added_policy(name, LatencyTable(tokens_s=(0.0, 1.0)))


def added_policy(name: str, latency: LatencyTable) -> SchedulingPolicy:
    """
    Create the policy that an installed package has under *name*.

    Raises:
        SettingsError: The object cannot be imported, or is not a policy.
    """
    made: SchedulingPolicy = extensions.make(extensions.POLICIES, name, SchedulingPolicy, latency)
    return made


def free_tokens(num_free_blocks: int, block_tokens: int) -> int:
    """
    Free KV tokens as reported to a policy.

    The value is reduced so that a prompt that fits by its tokens also fits in whole blocks.
    """
    rounding = max(0, block_tokens - _ASSUMED_BLOCK_TOKENS)
    return max(0, num_free_blocks * block_tokens - rounding)


def is_relegated(policy: SchedulingPolicy, request_id: RequestId) -> bool:
    """Return whether *policy* has relegated the request because it is late."""
    return isinstance(policy, QoServePolicy) and policy.rank(request_id) is Rank.RELEGATED
