"""Totals from which an agent selects operations, and from which other services predict them."""

from shared.contracts.base import Seconds, Value


class RunningFacts(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Running requests of one lane; each value is a sum over these requests."""

    lane: str
    requests: int
    context_tokens: int = 0
    """Number of tokens of the requests' prompts and answers so far."""
    held_tokens: int = 0
    """Number of KV tokens that are freed when all these requests leave the engine."""
    gives_way: bool = False
    """
    True if the requests are best effort or relegated, so that regular requests may displace them.
    """
    remaining_s: Seconds | None = None
    """Predicted time until all these requests end; None if unknown for one of the requests."""
    slack_s: Seconds | None = None
    """
    Time for which the requests can pause and still meet their deadlines. None if one of the
    requests has no deadline.
    """


class LsoFacts(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Inputs for selecting LSOs on one instance; requests are counted instead of listed."""

    running: tuple[RunningFacts, ...] = ()
    swapped: int = 0
    """Number of swapped-out requests."""
    swapped_tokens: int = 0
    """Number of KV tokens that all swapped-out requests together need when they end."""
    resting: int = 0
    """Number of swapped-out requests in their rest period, which only a command can resume."""
    demand_tokens: int = 0
    """Number of KV tokens that all waiting requests of the window together need on the engine."""
    demand_slots: int = 0
    free_tokens: int = 0
    free_slots: int = 0
    kv_bytes_per_token: int = 0
    """KV size of one token of the active model in bytes; 0 if unknown."""
    transfer_bytes_per_s: float = 0.0
    """KV transfer rate from host memory to the engine, measured or assumed; 0 if unknown."""
    host_checkpoints: bool = False
    """True if the engine keeps KV in host memory."""
    host_kv_free_bytes: int = 0
    """Host memory for KV, without the part that is reserved for swapped-out requests."""
    warm_budget_bytes: int = 0
    """Host memory for all warm models."""
    drain_limit_s: Seconds = 0.0
    """Maximum duration of a drain before a model swap."""
    return_s: Seconds = 0.0
    """Time to activate the current model again after a swap, including a drain."""
    pull_room: int = 0
    """Number of requests that may be pulled now within the bounds."""
    resumes: bool = True
    """False if an evicted run loses its tokens, because the engine begins each answer again."""
