"""
Inputs of an agent's choice of operations, as totals, so that other services can predict the choice.
"""

from shared.contracts.base import Seconds, Value


class RunningFacts(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Running requests of one lane; sums over requests."""

    lane: str
    requests: int
    context_tokens: int = 0
    """Tokens of prompts and answers so far."""
    held_tokens: int = 0
    """KV tokens that are freed when all these requests leave the engine."""
    gives_way: bool = False
    """True if the requests are best effort or relegated, so that others may take their place."""
    remaining_s: Seconds | None = None
    """Predicted time until the requests end; None if it is unknown for one of them."""
    slack_s: Seconds | None = None
    """
    Time that the requests can pause and still meet their deadlines; None if one has no deadline.
    """


class LsoFacts(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Inputs of the choice of LSOs on one instance, with requests counted instead of named."""

    running: tuple[RunningFacts, ...] = ()
    swapped: int = 0
    """Number of swapped-out requests."""
    swapped_tokens: int = 0
    """KV tokens that all swapped-out requests together need when they end."""
    resting: int = 0
    """Number of swapped-out requests that may not yet be resumed without a command."""
    demand_tokens: int = 0
    """KV tokens that the waiting requests of the window need on the engine at the same time."""
    demand_slots: int = 0
    free_tokens: int = 0
    free_slots: int = 0
    kv_bytes_per_token: int = 0
    """KV size of one token of the active model; 0 when unknown."""
    transfer_bytes_per_s: float = 0.0
    """KV transfer rate from host memory to the engine, measured or prior; 0 when unknown."""
    host_checkpoints: bool = False
    """True if the engine keeps KV in host memory."""
    host_kv_free_bytes: int = 0
    """Host memory for KV that is not reserved for swapped-out requests."""
    warm_budget_bytes: int = 0
    """Host memory for all warm models."""
    drain_limit_s: Seconds = 0.0
    """Longest drain before a model swap."""
    return_s: Seconds = 0.0
    """Cost of activating the current model again."""
    pull_room: int = 0
    """Number of requests that the pull bounds allow to pull now."""
