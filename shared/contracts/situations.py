"""What an agent's operations depend on, as totals: enough to foresee them elsewhere."""

from shared.contracts.base import Seconds, Value


class RunningFacts(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What runs of one lane; sums over requests."""

    lane: str
    requests: int
    context_tokens: int = 0
    """Prompts and answers so far."""
    held_tokens: int = 0
    """KV tokens that are free when all of it leaves."""
    gives_way: bool = False
    """Best effort or relegated."""
    remaining_s: Seconds | None = None
    """Predicted until their ends; none when nobody can tell of one of them."""
    slack_s: Seconds | None = None
    """That they may stand still and be in time; none when one of them has no deadline."""


class LsoFacts(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One instance as the choice of LSOs sees it, with requests counted instead of named."""

    running: tuple[RunningFacts, ...] = ()
    swapped: int = 0
    """Swapped-out requests."""
    swapped_tokens: int = 0
    """KV tokens that they need at their ends, all together."""
    resting: int = 0
    """Of these, those that are not resumed by themselves yet."""
    demand_tokens: int = 0
    """KV tokens that the waiting work of the window needs at once."""
    demand_slots: int = 0
    free_tokens: int = 0
    free_slots: int = 0
    kv_bytes_per_token: int = 0
    """Of the active model; 0 when unknown."""
    transfer_bytes_per_s: float = 0.0
    """Of KV from host memory to the engine, as measured or the prior; 0 when unknown."""
    host_checkpoints: bool = False
    """Whether the engine keeps KV in host memory."""
    host_kv_free_bytes: int = 0
    """Host memory for KV that no swapped-out request may need."""
    warm_budget_bytes: int = 0
    """Host memory for all warm models."""
    drain_limit_s: Seconds = 0.0
    """Longest drain before a model swap."""
    return_s: Seconds = 0.0
    """What having the active model once more would cost."""
    pull_room: int = 0
    """Requests that the bounds allow to pull now."""
