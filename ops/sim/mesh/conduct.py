"""How an instance follows its virtual queue: LSOs, pulls and look-ahead."""

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
"""Sort key of the first request of a lane; the request with the smallest key is pulled next."""

WINDOW = 16


def by_deadline(request: MeshRequest) -> float:
    """Sort key for earliest deadline first; relegated requests come last."""
    return inf if request.relegated else request.deadline_at


def by_deadline_and_work(request: MeshRequest) -> float:
    """
    Sort key of lane heads, as in agents: the deadline plus a delay for each token of the request's
    work.
    """
    return by_deadline(request) + WORK_WEIGHT_S_PER_TOKEN * request.work_tokens


def by_arrival(request: MeshRequest) -> float:
    """Sort key for first come, first served."""
    return request.arrival.arrived_at


def drain_first(change: HeadChange, situation: Situation) -> Iterator[Lso]:
    """
    Rule: activate the head's model after all running requests have finished, without eviction.
    """
    head = change.head
    if head is not None and head.model != situation.active:
        yield Activate(
            model=head.model, drain_s=inf, reason=because(Rule.PLANNED, model=head.model)
        )


ALL_RULES: tuple[ActionRule, ...] = (swap_model, make_room, swap_in, keep_warm)
"""Rules of `lso_actions`, except pulling, which every simulated instance does."""
STOCK_RULES: tuple[ActionRule, ...] = (drain_first,)
assert set(ALL_RULES) < set(RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """
    The way in which an instance follows a plan.

    Source: QLM §5, §8.
    Decided: every arm pulls into a window of 16 requests that have not begun. With QLM, an
    instance pulls only from the head of its virtual queue; when the plan changes, it returns
    requests that have not begun. Without QLM, the window holds requests of all models: the
    instance serves requests of its active model, and swaps models when the window has no more.
    """

    window: int = WINDOW
    """Maximum number of pulled requests that have not begun."""
    key: PullKey = by_deadline
    rules: Sequence[ActionRule] = ALL_RULES
    looks_ahead: bool = False
    """True if the window may hold requests of models that are not active."""
    gives_back: bool = True
    """True if requests that have not begun return to their lanes when a new plan arrives."""
    shares: bool = True
    """True if the instance also pulls its model's more urgent work that is planned elsewhere."""
    relegates: bool = True
    """True if infeasible requests are served after feasible requests."""
    static_batch: int | None = None
    host_kv_bytes: int = 64 << 30
    """Host memory for swapped-out KV; 0 disables swapping out."""
    warm_bytes: int = 1 << 50
    """Host memory for weights of warm models."""
    drain_limit_s: Seconds = 30.0
