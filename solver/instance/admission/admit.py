"""Admission of waiting requests to the engine, and evictions that make room for them."""

import math
from collections.abc import Iterator

import msgspec

from shared.contracts.base import UnixTime
from shared.contracts.plans import Segment
from shared.contracts.qos import QosClass, Slo
from solver.instance import operations
from solver.instance.admission.server_order import relegate_late, waits_for_urgent
from solver.instance.commands import Command, Record, Submit
from solver.instance.load import unimportant_delay_s
from solver.instance.request import Ending, Held, Run
from solver.instance.state import InstanceState
from solver.instance.views import situation
from solver.planning.lso.actions import lso_actions, make_room
from solver.planning.lso.operations import Evict, Rule, SwapIn, because
from solver.planning.lso.results import LsoResult
from solver.planning.lso.situation import Demand, HeadChange
from solver.scheduling.engine.entry import Rank
from solver.scheduling.relegation import is_infeasible

LATE_PERIOD_S = 0.1
"""Least time between two checks for late runs that wait in the engine."""
_HAND_BACK, _MAKE_ROOM = "hand back late requests", "make room for the head"
_LEAVES_ROOM = (Ending.EVICTED, Ending.SWAPPED_OUT)


def admit(instance: InstanceState, now: UnixTime) -> Iterator[Command]:
    """Begin the runs of waiting requests while the engine has room for them."""
    yield from relegate_late(instance, now)
    while (held := _admissible(instance, now)) is not None:
        is_back = held.lease is not None
        yield from begin(instance, held, now)
        instance.work.pull = True
        if is_back:
            reason = because(Rule.ROOM_AGAIN, tokens=held.tokens_needed)
            lso = SwapIn(request_id=held.request_id, reason=reason)
            result = LsoResult(message="the request resumed in the order of the window")
            yield Record(lso=lso, result=result)
    if (head := _crowded_out(instance, now)) is not None:
        _make_room(instance, head, now)


def begin(instance: InstanceState, held: Held, now: UnixTime) -> Iterator[Command]:
    """Submit a waiting or resting request to the engine."""
    if held.lease is not None:
        instance.note(held, "resumed")
    if instance.orders_prefills and instance.holding.passes:
        instance.note(held, "passed on", instance.holding.reason)
    run = Run(
        run_id=instance.run_id(),
        submitted_at=now,
        room_tokens=held.tokens_needed,
        prefill_s=instance.room.prefilling_s + instance.room.prefill_s_of(held),
    )
    slo = run_slo(held, now)
    if slo.ttft_s is not None and held.first_token_at is None:
        instance.urgent.seen(slo.ttft_s, slo.tbt_s, now)
    instance.requests.submit(held, run)
    yield Submit(
        number=held.number,
        request=held.request,
        run_id=run.run_id,
        slo=slo,
        room_tokens=run.room_tokens,
        # Checkpoint the runs that may lose their KV to interactive work, as ConServe does for
        # harvested requests.
        checkpointed=not held.request.pools
        and (held.checkpointed or slo.qos_class is not QosClass.INTERACTIVE),
    )


def refusal(instance: InstanceState, held: Held) -> str | None:
    """Reason for which a request cannot run at once; None if it can."""
    if not _may_begin(instance):
        return "the instance is draining, swapping models or down, and starts no runs"
    if _must_wait(instance, held) or _is_isolated(instance):
        return "a request that ran during several engine crashes must run alone"
    if not _fits(instance, held):
        return (
            f"no room: {instance.requests.num_runs} of {instance.engine.max_running} requests run, "
            f"with up to {instance.room.reserved_tokens} of {instance.engine.kv_capacity_tokens} "
            f"KV tokens; the request needs {held.tokens_needed}"
        )
    return None


def hand_back_late(instance: InstanceState, now: UnixTime) -> None:
    """
    Evict requests that still wait in the engine past their deadlines; the next pull relegates them.

    The engine serves late requests last, so they would occupy the window without limit. The engine
    reports only the number of waiting runs: these are assumed to be the newest without a token.
    A server that others run is left alone: it begins its few waiting requests soon, and a run that
    it had begun would be computed twice.
    """
    num_waiting = 0 if instance.orders_prefills else instance.engine.waiting
    if not num_waiting or _HAND_BACK in instance.purposes or now < instance.late_at:
        return
    # The engine counts waiting runs late, so it may still include evicted ones.
    instance.late_at = now + LATE_PERIOD_S
    late = tuple(
        held.request_id
        for held in instance.requests.not_begun[-num_waiting:]
        if held.run is not None
        and held.run.ending is None
        and is_infeasible(held.request, now=now, prefill_s=0.0, decode_s=0.0)
    )
    if late:
        lso = Evict(request_ids=late, reason=because(Rule.LATE))
        operations.start_alone(instance, _HAND_BACK, lso)


def run_slo(held: Held, now: UnixTime) -> Slo:
    """
    Targets of one run. The first token of the run is the next token that the request needs.

    A request that yields has no targets, so that the engine serves regular requests first: a
    relegated one, and one whose deadline is far.

    A request that resumes on another engine has the deadline of its next token (QoServe eq. 2). If
    that deadline has passed, the request gets the TTFT target of a new request. Relegating it would
    turn a pause into a failure, because its first token was in time.
    """
    request = held.request
    slo = request.slo
    if held.rank is not Rank.REGULAR:
        return Slo()
    if slo.ttft_s is None or held.first_token_at is None:
        return slo
    num_tokens = held.generated // request.num_answers
    next_s = slo.ttft_s + num_tokens * (slo.tbt_s or 0.0)
    again_s = now - request.arrived_at + slo.ttft_s
    return msgspec.structs.replace(slo, ttft_s=max(next_s, again_s))


def _admissible(instance: InstanceState, now: UnixTime) -> Held | None:
    """The request that may begin now."""
    if not _may_begin(instance) or _is_isolated(instance):
        return None
    for head in _heads(instance, now):
        if _must_wait(instance, head):
            return None
        if head.rank is not Rank.REGULAR and not _has_best_effort_room(instance):
            # A best-effort request that precedes regular ones through aging must not block the
            # slots that are reserved for them.
            continue
        if waits_for_urgent(instance, head, now):
            continue
        return head if _fits(instance, head) else None
    return None


def _heads(instance: InstanceState, now: UnixTime) -> Iterator[Held]:
    """
    The request of the window that is next, the first ones of the other ranks, and the first
    interactive one, which others before it that can wait must not stop.
    """
    delay_s = unimportant_delay_s(instance, now)
    first = instance.requests.head(now, unimportant_delay_s=delay_s)
    if first is None:
        return
    yield first
    for rank in Rank:
        head = instance.requests.head_of(rank, unimportant_delay_s=delay_s)
        if head is not None and rank is not first.rank:
            yield head
    if instance.orders_prefills and (urgent := instance.requests.first_interactive()) is not None:
        yield urgent


def _crowded_out(instance: InstanceState, now: UnixTime) -> Held | None:
    """The regular request at the head of the window, if only room is missing."""
    if not _may_begin(instance) or _is_isolated(instance):
        return None
    head = instance.requests.head(now, unimportant_delay_s=unimportant_delay_s(instance, now))
    if head is None or head.rank is not Rank.REGULAR or _must_wait(instance, head):
        return None
    return None if _fits(instance, head) else head


def _may_begin(instance: InstanceState) -> bool:
    return not instance.following.swapping and not instance.draining and instance.engine.alive


def _must_wait(instance: InstanceState, head: Held) -> bool:
    """True if *head* must run alone and others run."""
    return head.is_suspect and instance.requests.num_runs > 0


def _is_isolated(instance: InstanceState) -> bool:
    """True while a request runs that is suspected of crashing engines."""
    return instance.requests.num_suspects > 0


def _fits(instance: InstanceState, held: Held) -> bool:
    requests, engine = instance.requests, instance.engine
    if not requests.num_runs:
        return True
    if requests.num_runs >= engine.max_running + engine.spare_running:
        return False
    # An engine that has not reported its KV capacity counts as unbounded.
    capacity = engine.kv_capacity_tokens or math.inf
    return instance.room.reserved_tokens + held.tokens_needed <= capacity


def _has_best_effort_room(instance: InstanceState) -> bool:
    """
    True if best-effort work may take a free slot of the engine; some slots are reserved for regular
    requests while such requests run.
    """
    by_rank = instance.room.running_by_rank
    best_effort = by_rank[Rank.BEST_EFFORT] + by_rank[Rank.RELEGATED]
    if best_effort == instance.requests.num_runs:
        return True
    limit = instance.settings.best_effort_running_share * instance.engine.max_running
    return best_effort < max(1, int(limit))


def _has_displaceable(instance: InstanceState) -> bool:
    """
    Return whether the head may displace any run: best-effort or relegated work, or work of lanes
    that are behind it in the plan. Most instances have none, and the situation takes time to make.
    """
    by_rank, plan = instance.room.running_by_rank, instance.following.plan
    if by_rank[Rank.BEST_EFFORT] or by_rank[Rank.RELEGATED]:
        return True
    segments = plan.queue.segments if plan is not None else ()
    return any(segment.model == instance.model for segment in segments[1:])


def _make_room(instance: InstanceState, head: Held, now: UnixTime) -> None:
    """Displace runs for the request *head* by the rule of QLM §5, one run at a time."""
    if _MAKE_ROOM in instance.purposes or not _has_displaceable(instance):
        return
    if any(
        held.run is not None and held.run.ending in _LEAVES_ROOM for held in instance.requests.runs
    ):
        return
    model, plan = head.request.model.base, instance.following.plan
    queue = plan.queue.segments if plan is not None else ()
    if not queue or queue[0].model != model:
        # The plan's active segment is not of the head's model, so only best-effort work waits
        # behind the head.
        queue = (Segment(model=model),)
    demand = Demand(tokens=head.tokens_needed, slots=1)
    change = HeadChange(old_head=None, queue=queue)
    lsos = lso_actions(change, situation(instance, now, demand), rules=(make_room,))
    operations.start_alone(instance, _MAKE_ROOM, *lsos)
