"""How an instance follows its virtual queue: which LSOs it has, and how far it looks ahead."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from ops.sim.mesh.request import MeshRequest
from shared.contracts.base import Seconds
from solver.planning.lso_actions import RULES, ActionRule, keep_warm, make_room, swap_in, swap_model
from solver.planning.lso_situation import HeadChange, Situation
from solver.planning.lsos import Activate, Lso, Rule, because
from solver.scheduling.pulling import WORK_WEIGHT_S_PER_TOKEN

PullKey = Callable[[MeshRequest], float]
"""Of the heads of several lanes, the smallest is pulled next."""

WINDOW = 16


def by_deadline(request: MeshRequest) -> float:
    """Earliest deadline first; what has lost its claim comes last."""
    return inf if request.relegated else request.deadline_at


def by_deadline_and_work(request: MeshRequest) -> float:
    """As agents order lane heads: of equal deadlines the smaller prompt is before the larger."""
    return by_deadline(request) + WORK_WEIGHT_S_PER_TOKEN * request.num_prefill_tokens


def by_arrival(request: MeshRequest) -> float:
    """First come, first served."""
    return request.arrival.arrived_at


def drain_first(change: HeadChange, situation: Situation) -> Iterator[Lso]:
    """Whatever runs may finish, then the head's model comes: an engine without eviction."""
    head = change.head
    if head is not None and head.model != situation.active:
        yield Activate(
            model=head.model, drain_s=inf, reason=because(Rule.PLANNED, model=head.model)
        )


ALL_RULES: tuple[ActionRule, ...] = (swap_model, make_room, swap_in, keep_warm)
"""The table of `lso_actions`; pulling is what an instance does anyway."""
STOCK_RULES: tuple[ActionRule, ...] = (drain_first,)
assert set(ALL_RULES) < set(RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """
    What an instance does with a plan.

    Source: QLM §5, §8.
    Decided: every arm pulls into a window of 16 that has not begun. QLM's takes from the head of
    its queue only, and gives back what it has not begun when the plan changes; that of an engine
    without QLM looks ahead over all models, serves what its model has there, and changes models
    when nothing of the active one is left.
    """

    window: int = WINDOW
    """Pulled requests that have not begun, at most."""
    key: PullKey = by_deadline
    rules: Sequence[ActionRule] = ALL_RULES
    looks_ahead: bool = False
    """Whether the window may hold other models than the active one."""
    gives_back: bool = True
    """Whether what has not begun goes back to its lane when a plan comes."""
    shares: bool = True
    """Whether it takes more urgent work of its model that is planned elsewhere."""
    relegates: bool = True
    """Whether what cannot be in time any more gives way to what can."""
    static_batch: int | None = None
    host_kv_bytes: int = 64 << 30
    """For swapped-out KV; 0 is none."""
    warm_bytes: int = 1 << 50
    """Host memory for weights."""
    drain_limit_s: Seconds = 30.0
