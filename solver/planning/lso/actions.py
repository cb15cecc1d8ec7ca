"""Table of QLM §5: the LLM serving operations that a change of the virtual queue requires."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from shared.contracts.base import ModelName, Seconds
from shared.contracts.plans import Segment
from shared.contracts.telemetry import Residency
from solver.planning.lso.evict_or_swap import Choice, evict_or_swap, recompute_s
from solver.planning.lso.model_swap import DrainPlan, Leaving, cheapest_drain, drain_limit_s
from solver.planning.lso.operations import (
    Activate,
    Cool,
    Evict,
    Lso,
    Pull,
    Reason,
    Rule,
    SwapIn,
    SwapOut,
    Warm,
    because,
)
from solver.planning.lso.situation import HeadChange, RunningWork, Situation, WarmSet

ActionRule = Callable[[HeadChange, Situation], Iterable[Lso]]
"""
One row of the table `RULES`: yields the required operations; yields none if the row does not apply.
"""


def lso_actions(
    change: HeadChange, situation: Situation, rules: Sequence[ActionRule] | None = None
) -> tuple[Lso, ...]:
    """
    The operations, in order, that make the instance follow the change *change* of its virtual
    queue.

    Args:
        change: The old head and the new queue.
        rules: Replaces `RULES`.

    Source: QLM §5. Load balancing is not an operation here: the plan assigns lanes to instances.
    Differs: an evicted request may be resumed on any instance; in QLM a started request stays on
    its instance. An evicted request is requeued with its tokens, so resuming costs one prefill
    anywhere.
    """
    table = RULES if rules is None else rules
    return tuple(lso for rule in table for lso in rule(change, situation))


def swap_model(change: HeadChange, situation: Situation) -> Iterator[Lso]:
    """
    If the head's model is not active, empty the instance in the cheapest way, then swap models.
    """
    head = change.head
    if head is None or head.model == situation.active:
        return
    if situation.active is not None:
        yield from _leave(situation.active, change, situation)
    plan = drain_plan(situation, change.queue)
    yield Activate(
        model=head.model,
        drain_s=plan.drain_s if situation.running else 0.0,
        reason=_activation_reason(head.model, plan, situation),
        predicted_s=_swap_s(head.model, plan, situation),
    )


def make_room(change: HeadChange, situation: Situation) -> Iterator[Lso]:
    """
    If the work of the queue's head does not fit, remove the work that the head displaces, in the
    order of `_loss`.

    The head displaces best-effort work, relegated work, and the work of groups that are now behind
    it.
    Differs: the work of a group that is no longer in the queue stays, because a lane leaves the
    plan when its last requests have begun to run.
    Differs: if an evicted run loses its tokens, the head waits, because the lost work would be done
    twice.
    Differs: work that would begin again before the head's stays, because it would take the room
    that it leaves, again and again.
    """
    head, costs = change.head, situation.costs
    if head is None or head.model != situation.active or not situation.resumes:
        return
    lack_tokens = situation.demand.tokens - situation.free_tokens
    lack_slots = situation.demand.slots - situation.free_slots
    behind = _lanes_of(change.queue[1:], head.model) - _lanes_of((head,), head.model)
    displaced = [
        work
        for work in situation.running
        if (work.gives_way or work.lane in behind) and not work.begins_first
    ]
    host_free_bytes = situation.host_kv_free_bytes
    for work in sorted(displaced, key=_loss):
        if lack_tokens <= 0 and lack_slots <= 0:
            return
        verdict = evict_or_swap(
            costs, context_tokens=work.context_tokens, host_free_bytes=host_free_bytes
        )
        reason = because(
            Rule.HEAD_NEEDS_ROOM,
            lack_tokens=max(0, lack_tokens),
            lack_slots=max(0, lack_slots),
            verdict=verdict.text,
            recompute_s=verdict.recompute_s,
            transfer_s=verdict.transfer_s,
        )
        if verdict.choice is Choice.SWAP_OUT:
            host_free_bytes -= verdict.host_bytes
            yield SwapOut(request_id=work.request_id, reason=reason, predicted_s=verdict.transfer_s)
        else:
            yield Evict(
                request_ids=(work.request_id,),
                reason=reason,
                predicted_s=None if costs.latency is None else verdict.recompute_s,
            )
        lack_tokens -= work.held_tokens
        lack_slots -= 1


def swap_in(change: HeadChange, situation: Situation) -> Iterator[Lso]:
    """
    Resume swapped-out requests in the KV and slots that the work of the queue's head leaves free.
    """
    head = change.head
    if head is not None and head.model != situation.active:
        return
    tokens = situation.free_tokens - situation.demand.tokens
    slots = situation.free_slots - situation.demand.slots
    for work in situation.swapped:
        if not work.rested:
            continue
        if work.needed_tokens > tokens or slots < 1:
            return
        tokens -= work.needed_tokens
        slots -= 1
        yield SwapIn(
            request_id=work.request_id,
            reason=because(Rule.ROOM_AGAIN, tokens=work.needed_tokens),
        )


def keep_warm(change: HeadChange, situation: Situation) -> Iterator[Lso]:
    """
    Load the models behind the head of the queue into host memory, in queue order, until the memory
    is full.

    A warm model that is not in the queue stays until its memory is needed.
    Decided: a model that does not fit is skipped, and a smaller model behind it may be warmed.
    """
    warm_set = situation.warm_set
    if not warm_set.budget_bytes:
        return
    active = situation.active if change.head is None else change.head.model
    later = [model for model in _models(change.queue) if model != active]
    free_bytes = warm_set.budget_bytes
    wanted: list[ModelName] = []
    for model in later:
        if (num_bytes := warm_set.num_bytes.get(model, 0)) <= free_bytes:
            wanted.append(model)
            free_bytes -= num_bytes
    if not wanted:
        return
    for model in _warm(warm_set, situation.active):
        if model in (*wanted, active):
            continue
        if (num_bytes := warm_set.num_bytes.get(model, 0)) <= free_bytes:
            free_bytes -= num_bytes
        else:
            yield Cool(model=model, reason=because(Rule.NOT_QUEUED, model=model))
    for model in wanted:
        if warm_set.residency.get(model, Residency.COLD) is Residency.COLD:
            num_bytes = warm_set.num_bytes.get(model, 0)
            yield Warm(model=model, reason=because(Rule.LATER, model=model, num_bytes=num_bytes))


def pull(change: HeadChange, situation: Situation) -> Iterator[Lso]:
    """
    Pull immediately if the head has groups that the old head did not have, and there is room.

    Later requests of the head's groups are pulled when they arrive.
    """
    head, old = change.head, change.old_head
    if head is None:
        return
    known = set() if old is None else _lanes_of((old,), head.model)
    if _lanes_of((head,), head.model) - known and situation.pull_room > 0:
        count = situation.pull_room
        yield Pull(count=count, reason=because(Rule.PULL_ROOM, count=count))


RULES: tuple[ActionRule, ...] = (swap_model, make_room, swap_in, keep_warm, pull)
"""
All rules for selecting LLM serving operations, in the order in which the operations are executed.
"""


def drain_plan(situation: Situation, queue: Sequence[Segment] = ()) -> DrainPlan:
    """
    Choose the runs that may finish before the head's model in *queue* replaces the active model.

    Evicted runs need another activation of their model, unless the queue contains the model anyway.
    """
    comes_back = situation.active in _models(queue)
    activate_s = situation.activate_s.get(queue[0].model, math.inf) if queue else math.inf
    return cheapest_drain(
        [
            Leaving(
                request_id=work.request_id,
                remaining_s=work.remaining_s,
                resume_s=recompute_s(situation.costs, work.context_tokens),
                slack_s=work.slack_s,
            )
            for work in situation.running
        ],
        limit_s=drain_limit_s(situation.drain_limit_s, activate_s),
        return_s=0.0 if comes_back else situation.return_s,
    )


def _leave(old: ModelName, change: HeadChange, situation: Situation) -> Iterator[Lso]:
    if situation.swapped:
        yield Evict(
            request_ids=tuple(work.request_id for work in situation.swapped),
            reason=because(Rule.MODEL_LEAVES, model=old),
        )
    plan = drain_plan(situation, change.queue)
    if plan.evicted and change.head is not None:
        yield Evict(
            request_ids=plan.evicted,
            reason=because(
                Rule.EVICT_CHEAPER,
                new=change.head.model,
                old=old,
                drain_s=plan.predicted_s,
                recompute_s=plan.recompute_s,
            ),
            predicted_s=plan.recompute_s,
        )


def _activation_reason(model: ModelName, plan: DrainPlan, situation: Situation) -> Reason:
    """
    Reason for activating the head's model, with the costs of draining and evicting the running
    requests.
    """
    if not situation.running:
        return because(Rule.PLANNED, model=model)
    if not plan.is_predicted:
        return because(Rule.PLANNED_BLIND, model=model, drain_s=plan.drain_s)
    return because(
        Rule.PLANNED_CHEAPEST,
        model=model,
        drain_s=plan.predicted_s,
        recompute_s=plan.recompute_s,
        return_s=plan.return_s,
        drain_all_s=plan.drain_all_s,
        evict_all_s=plan.evict_all_s,
    )


def _swap_s(model: ModelName, plan: DrainPlan, situation: Situation) -> Seconds | None:
    """Time of the drain and the activation in a model swap; none if either time is unknown."""
    activate_s = situation.activate_s.get(model)
    if activate_s is None or not plan.is_predicted:
        return None
    return plan.predicted_s + activate_s


def _loss(work: RunningWork) -> tuple[bool, int, str]:
    """
    Sort key of displaced runs: best-effort and relegated runs first, then runs with the least to
    recompute.
    """
    return (not work.gives_way, work.context_tokens, work.request_id)


def _lanes_of(segments: Iterable[Segment], model: ModelName) -> set[str]:
    return {quota.lane for segment in segments if segment.model == model for quota in segment.lanes}


def _models(queue: Iterable[Segment]) -> tuple[ModelName, ...]:
    return tuple(dict.fromkeys(segment.model for segment in queue))


def _warm(warm_set: WarmSet, parked: ModelName | None) -> tuple[ModelName, ...]:
    """
    Models in host memory after the engine of the active model, *parked*, has been moved there.
    """
    return tuple(
        model
        for model, residency in warm_set.residency.items()
        if residency is Residency.WARM or model == parked
    )
