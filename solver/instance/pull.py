"""Pulls: which queue is asked next, and what happens to a request that comes from it."""

import math
from collections.abc import Iterable, Iterator

from shared.contracts.base import InstanceId, UnixTime
from shared.contracts.lanes import LaneKey, LaneLayout, inbox_name, model_of
from shared.contracts.qos import Importance
from solver.instance import end
from solver.instance.admission.server_order import (
    has_patient_room,
    patience_s,
    patience_s_per_token,
)
from solver.instance.commands import Command, Get
from solver.instance.events import (
    Delivered,
    Noticed,
    PullEnded,
    PullOutcome,
    Retired,
    Retiring,
)
from solver.instance.load import is_crowded, is_late, num_free, unimportant_delay_s, work
from solver.instance.renewal import renew
from solver.instance.request import Held
from solver.instance.state import InstanceState
from solver.planning.lanes import band_lower_edge_s
from solver.prediction.latency.service_time import (
    predicted_output_tokens,
)
from solver.scheduling.pull_room import has_best_effort_room, has_room
from solver.scheduling.pulling import (
    TURNS_DEFERENCE_S,
    Openings,
    Source,
    SourceKind,
    deference_s,
)

BROKER_RETRY_S = 0.5
"""Time without pulls after the broker could not be reached."""
_LEAST_TARGET_S = 1.0
RETIREMENT_S = 15.0
"""Maximum duration of a leader's attempt to delete a queue."""


def pull(instance: InstanceState, now: UnixTime) -> Iterator[Command]:
    """Ask queues while the bounds allow it."""
    while instance.num_pulls < instance.most_pulls:
        source = next_source(instance, now)
        if source is None:
            return
        yield get(instance, source.queue)


def get(instance: InstanceState, queue: str) -> Get:
    """Begin a pull from *queue*."""
    instance.pulls[queue] += 1
    instance.num_pulls += 1
    return Get(queue=queue)


def next_source(instance: InstanceState, now: UnixTime) -> Source | None:
    """The queue to ask now."""
    if now < instance.pull_at:
        return None
    if instance.stopping:
        return _copies(instance, now)
    if not instance.may_pull:
        # The inbox holds requests that only this instance reads: they return to their lanes.
        return instance.order.inbox(now)
    openings = _openings(instance, now)
    if openings is None:
        return _copies(instance, now)
    return instance.order.next(
        now, openings, unimportant_delay_s=unimportant_delay_s(instance, now)
    )


def _openings(instance: InstanceState, now: UnixTime) -> Openings | None:
    """Which requests may be pulled; None if there is no room for any."""
    held, bounds = work(instance)
    if not instance.orders_prefills:
        if not has_room(held, bounds):
            return None
        return Openings(yielding=has_best_effort_room(held, bounds))
    passes = instance.holding.passes
    if not passes and not has_room(held, bounds):
        return None
    # An interactive request that has to wait here could begin elsewhere, as could the next one.
    is_held = is_crowded(instance, now) and not passes
    waits = instance.requests.first_interactive() is not None or is_held
    return Openings(
        regular=num_free(instance) > 0 and not waits,
        yielding=has_patient_room(instance, now),
        patience_s=patience_s(instance),
        patience_s_per_token=patience_s_per_token(instance),
        aging_bound_s=instance.settings.aging_bound_s,
    )


def _copies(instance: InstanceState, now: UnixTime) -> Source | None:
    """The inbox, if it has copies of renewed requests that no pull in progress will bring."""
    if instance.pulls[instance.inbox] >= len(instance.renewals.awaited):
        return None
    return instance.order.inbox(now)


def _copies_at(instance: InstanceState) -> UnixTime:
    """Time of the next pull that is only for copies of renewed requests."""
    if instance.pulls[instance.inbox] >= len(instance.renewals.awaited):
        return math.inf
    return max(instance.pull_at, instance.order.inbox_at())


def next_at(instance: InstanceState, now: UnixTime) -> UnixTime:
    """Time of the next pull without another event."""
    if instance.num_pulls >= instance.most_pulls:
        return math.inf
    if instance.stopping:
        return _copies_at(instance)
    if not instance.may_pull:
        return max(instance.pull_at, instance.order.inbox_at())
    openings = _openings(instance, now)
    if openings is None:
        return _copies_at(instance)
    return max(instance.pull_at, instance.order.wake_at(now, openings))


def on_delivered(instance: InstanceState, event: Delivered, now: UnixTime) -> Iterator[Command]:
    """Decide what happens to a pulled request."""
    queue, request = event.tag.queue, event.request
    _pull_ended(instance, queue)
    copied = renew.joined(instance, event, now)
    if copied is not None:
        yield from copied
        return
    work_tokens = request.prompt_tokens + predicted_output_tokens(request, instance.profile)
    instance.order.pulled(queue, request.deadline_at, work_tokens, request.arrived_at)
    held = Held(number=instance.number(), request=request, tags=[event.tag], pulled_at=now)
    if (known := instance.requests.find(request.request_id)) is not None:
        yield from _join(instance, known, held, now)
        return
    instance.totals.pull(queue, request.grouped_at)
    instance.following.busy_at = now
    instance.work.admit = True
    if instance.is_cancelled(held):
        yield from end.fail(instance, held, end.CANCELLED)
    elif held.end.at <= now:
        yield from end.fail_expired(instance, held, end.PULL)
    elif request.model.base != instance.model or not instance.may_pull:
        yield from end.hand_back(instance, held)
    else:
        instance.note_activation(held)
        yield from _kept_or_relegated(instance, held, now)


def _kept_or_relegated(instance: InstanceState, held: Held, now: UnixTime) -> Iterator[Command]:
    """Hold a request that may run here, or relegate it if its deadline cannot be met."""
    if is_late(instance, held, now):
        yield from end.relegate(instance, held)
    else:
        instance.requests.hold(held)
        instance.renewals.schedule(held, now)


def on_pull_ended(instance: InstanceState, event: PullEnded, now: UnixTime) -> Iterator[Command]:
    """Do not ask an empty queue again at once."""
    _pull_ended(instance, event.queue)
    match event.outcome:
        case PullOutcome.EMPTY:
            instance.order.empty(event.queue, now, asked_at=event.asked_at)
        case PullOutcome.ABSENT:
            instance.order.absent(event.queue, now, asked_at=event.asked_at)
        case PullOutcome.UNREACHABLE:
            instance.pull_at = now + BROKER_RETRY_S
        case PullOutcome.DEAD_LETTERED:
            pass
    renew.missed(instance, event, now)
    yield from ()


def on_noticed(instance: InstanceState, event: Noticed, now: UnixTime) -> Iterator[Command]:
    """Ask a queue into which a request was put."""
    known = event.queue in instance.noticed
    instance.noticed[event.queue] = now
    taken = instance.room.taken(instance.engine)
    if instance.orders_prefills:
        # A server often has prefills, and the best server of its agent has the first turn.
        after_s = deference_s(0.0, taken, TURNS_DEFERENCE_S)
    else:
        after_s = deference_s(instance.room.prefill_s(), taken)
    if instance.order.nonempty(event.queue, now, after_s=after_s):
        instance.work.pull = True
        target_s = instance.order.time_left_s(event.queue)
        if target_s is not None and target_s < patience_s(instance):
            # Also where other instances serve all urgent work.
            instance.urgent.noticed(max(target_s, _LEAST_TARGET_S), now)
    elif instance.model is None or (not known and model_of(event.queue) == instance.model):
        instance.work.follow = True
    yield from ()


def on_retiring(instance: InstanceState, event: Retiring, now: UnixTime) -> Iterator[Command]:
    """Stop asking queues that the leader is about to delete."""
    for queue in event.queues:
        instance.order.pause(queue, now + RETIREMENT_S)
    yield from ()


def on_retired(instance: InstanceState, event: Retired, now: UnixTime) -> Iterator[Command]:
    """Handle the end of a retirement."""
    for queue in event.deleted:
        instance.noticed.pop(queue, None)
        instance.order.absent(queue, now, asked_at=now)
    for queue in event.kept:
        instance.order.nonempty(queue, now)
    instance.work.pull = True
    yield from ()


def _pull_ended(instance: InstanceState, queue: str) -> None:
    instance.pulls[queue] -= 1
    if not instance.pulls[queue]:
        del instance.pulls[queue]
    instance.num_pulls -= 1
    instance.work.pull = True


def _join(instance: InstanceState, known: Held, held: Held, now: UnixTime) -> Iterator[Command]:
    """
    Merge a pulled message into the held request with the same id.

    A newer copy replaces a held request that has not run here. If the held request has run here,
    the newer copy is handed back. A message with the same id from another producer is always handed
    back.
    """
    old, new = known.request, held.request
    same = (old.tenant, old.reply_to) == (new.tenant, new.reply_to)
    if same and not known.tags:
        instance.renewals.schedule(known, now)  # earlier deliveries are void
    if same and new.attempts.hop <= old.attempts.hop:
        # The message was delivered again after a lost connection, or is a second copy.
        instance.requests.join(known, held.tags)
    elif same and known.only_waits:
        instance.requests.replace(known, held)
    else:
        # Dropping the newer copy of a running request could lose it: the producer may stop the
        # older run as superseded.
        until = now + instance.settings.evict_hold_s
        instance.order.hold(end.return_queue(new), until)
        yield from end.hand_back(instance, held)


def sources_of(instance_id: InstanceId, queues: Iterable[str], layout: LaneLayout) -> list[Source]:
    """
    The instance's inbox and *queues*, as sources.

    Args:
        instance_id: Owner of the inbox.
        queues: Lanes and companion queues of the active model that exist.
        layout: Queue layout, for the deadlines of lanes.
    """
    inbox = Source(queue=inbox_name(instance_id), kind=SourceKind.INBOX, time_left_s=0.0)
    return [inbox, *(_source(queue, layout) for queue in sorted(queues))]


def _source(queue: str, layout: LaneLayout) -> Source:
    kind = queue.partition(".")[0]
    if kind == "relegated":
        return Source(queue=queue, kind=SourceKind.RELEGATED, time_left_s=0.0)
    if kind == "resume":
        band = int(queue.rpartition(".")[2])
        time_left_s = band_lower_edge_s(band, layout)
        return Source(queue=queue, kind=SourceKind.RESUME, time_left_s=time_left_s)
    key = LaneKey.parse(queue)
    overflow = queue == key.overflow_name
    return Source(
        queue=queue,
        kind=SourceKind.OVERFLOW if overflow else SourceKind.LANE,
        time_left_s=band_lower_edge_s(key.band, layout),
        is_important=key.importance != Importance.LOW.value,
        behind=key.queue_name if overflow else None,
    )
