"""Behaviour of an instance with its virtual queue: its LSOs, and its look-ahead."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from ops.sim.mesh.request import MeshRequest
from shared.contracts.base import Seconds
from solver.planning.lso.actions import RULES, ActionRule, keep_warm, make_room, swap_in, swap_model
from solver.planning.lso.operations import Activate, Lso, Rule, because
from solver.planning.lso.situation import HeadChange, Situation
from solver.scheduling.pulling import WORK_WEIGHT_S_PER_TOKEN

PullKey = Callable[[MeshRequest], float]
"""Key of lane heads; the smallest is pulled next."""

WINDOW = 16


def by_deadline(request: MeshRequest) -> float:
    """Earliest deadline first; relegated requests come last."""
    return inf if request.relegated else request.deadline_at


def by_deadline_and_work(request: MeshRequest) -> float:
    """As agents order lane heads: of equal deadlines, the smaller prompt goes first."""
    return by_deadline(request) + WORK_WEIGHT_S_PER_TOKEN * request.num_prefill_tokens


def by_arrival(request: MeshRequest) -> float:
    """First come, first served."""
    return request.arrival.arrived_at


def drain_first(change: HeadChange, situation: Situation) -> Iterator[Lso]:
    """All running requests may finish, then the head's model is activated: without eviction."""
    head = change.head
    if head is not None and head.model != situation.active:
        yield Activate(
            model=head.model, drain_s=inf, reason=because(Rule.PLANNED, model=head.model)
        )


ALL_RULES: tuple[ActionRule, ...] = (swap_model, make_room, swap_in, keep_warm)
"""The table of `lso_actions`, without pulling, which an instance does anyway."""
STOCK_RULES: tuple[ActionRule, ...] = (drain_first,)
assert set(ALL_RULES) < set(RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """
    How an instance follows a plan.

    Source: QLM §5, §8.
    Decided: every arm pulls into a window of 16 requests that have not begun. With QLM, an instance
    pulls only from the head of its queue, and returns what it has not begun when the plan changes;
    without QLM, it looks ahead over all models, serves requests of its active model from there, and
    changes models when none of the active one are left.
    """

    window: int = WINDOW
    """Maximum number of pulled requests that have not begun."""
    key: PullKey = by_deadline
    rules: Sequence[ActionRule] = ALL_RULES
    looks_ahead: bool = False
    """True if the window may hold other models than the active one."""
    gives_back: bool = True
    """True if requests that have not begun return to their lanes when a plan comes."""
    shares: bool = True
    """True if the instance also takes more urgent work of its model that is planned elsewhere."""
    relegates: bool = True
    """True if infeasible requests are served after feasible ones."""
    static_batch: int | None = None
    host_kv_bytes: int = 64 << 30
    """Host memory for swapped-out KV; 0 is none."""
    warm_bytes: int = 1 << 50
    """Host memory for weights."""
    drain_limit_s: Seconds = 30.0
