"""Outcomes of requests that leave the instance; each ends with an acknowledgement."""

from collections.abc import Iterator

import msgspec

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.ends import expired_error, nearest_end
from shared.contracts.lanes import LaneKey, relegated_name
from shared.contracts.requests import Attempts, ErrorInfo, QueuedRequest
from solver.instance.commands import (
    Abort,
    Command,
    Completion,
    DeadLetter,
    Depart,
    Discard,
    Failure,
    Publication,
    Requeueing,
    Reserve,
    Return,
)
from solver.instance.events import Begun, Departed, Ended, Outgrown, Rendered, RunEnd, Stranded
from solver.instance.load import is_crowded, prefill_pace
from solver.instance.request import Ending, Held, Lease, Phase
from solver.instance.state import InstanceState
from solver.scheduling.engine.entry import Rank

CANCELLED = ErrorInfo(
    message="the request was cancelled", type="cancelled", code="cancelled", status=499
)
PULL, WINDOW, RUN = "pull", "window", "run"
"""Where a request was at its end."""
RETURNED_AT_CRASH = "returned when the engine died"
MAX_CRASHES = 3
"""Number of crashes after which a request that ran alone is failed as the cause of the crashes."""
MAX_BREAKS = 3
"""
Number of broken connections without a new token after which a request fails: it may be what breaks
them.
"""
_POISON = ErrorInfo(
    message=f"the engine crashed {MAX_CRASHES} times while this request ran, the last time while "
    "it ran alone",
    type="server_error",
    code="poison_request",
    status=500,
)
_UNKNOWN = ErrorInfo(
    message="the instance could not run the request",
    type="server_error",
    code="internal_error",
    status=500,
)
_GROWTH = (0.25, 1.0)
"""Share by which an answer may grow after it has outgrown its room: the first time, and later."""


def abort(
    instance: InstanceState,
    held: Held,
    ending: Ending,
    *,
    why: str = "",
    rest_s: Seconds = 0.0,
) -> Iterator[Command]:
    """End the run of *held*; a run that ends already keeps its first reason."""
    if held.run is not None and held.run.ending is None:
        instance.requests.abort(held, ending, why=why, rest_s=rest_s)
        yield Abort(run_id=held.run.run_id)


def on_rendered(instance: InstanceState, event: Rendered, _now: UnixTime) -> Iterator[Command]:
    """Take over the true length of the prompts of a call."""
    held = instance.requests.of_run(event.run_id)
    if held is not None and held.request.prompt_tokens != event.prompt_tokens:
        held.request = msgspec.structs.replace(held.request, prompt_tokens=event.prompt_tokens)
        instance.room.changed(held)
        yield from _reserve(instance, held)


def on_begun(instance: InstanceState, event: Begun, now: UnixTime) -> Iterator[Command]:
    """The request no longer delays others: there is room for one more."""
    held = instance.requests.of_run(event.run_id)
    if held is not None:
        if is_crowded(instance, now):
            instance.urgent.crowded_at = now
        is_seen = not (instance.orders_prefills and held.comes_whole)
        if held.run is not None and held.rank is Rank.REGULAR and is_seen:
            measured_s = now - held.run.submitted_at
            instance.room.prefill_pace.add(predicted_s=held.run.prefill_s, measured_s=measured_s)
            due_at = held.request.slo.token_deadline_at(held.request.arrived_at, 1)
            _note_first_token(instance, held, now, in_time=now <= due_at)
        instance.requests.begin(held)
        instance.work.pull = True
        instance.work.admit |= instance.orders_prefills
    yield from ()


def note_prefilled(instance: InstanceState, now: UnixTime) -> None:
    """
    Count prompts as computed at their predicted times at servers that send answers as a whole.

    Such an answer has its first token at its end: until then, it would count as a prefill.
    """
    for held in instance.requests.not_begun:
        if held.comes_whole and held.run is not None and not held.run.prefilled:
            prefill_s = prefill_pace(instance) * held.run.prefill_s
            if now - held.run.submitted_at >= prefill_s:
                instance.requests.prefilled(held)


def _note_first_token(instance: InstanceState, held: Held, now: UnixTime, *, in_time: bool) -> None:
    """Record whether a request with a target for its first token met it."""
    request = held.request
    if request.slo.ttft_s is not None and held.first_token_at is None:
        instance.holding.served(request.arrived_at, now - request.arrived_at, in_time=in_time)


def on_outgrown(instance: InstanceState, event: Outgrown, _now: UnixTime) -> Iterator[Command]:
    """Reserve more room for a run whose answer is longer than expected."""
    held = instance.requests.of_run(event.run_id)
    if held is not None and held.run is not None:
        held.generated = event.num_tokens
        held.run.growths += 1
        yield from _reserve(instance, held)


def _reserve(instance: InstanceState, held: Held) -> Iterator[Command]:
    run = held.run
    if run is None:
        return
    share = _GROWTH[min(run.growths, len(_GROWTH)) - 1] if run.growths else 0.0
    grown = held.request.prompt_tokens + round(held.generated * (1 + share))
    limit = held.request.prompt_tokens + held.request.sampling.max_tokens
    instance.requests.reserve(held, min(limit, max(held.tokens_needed, grown)))
    yield Reserve(run_id=run.run_id, room_tokens=run.room_tokens)


def on_ended(instance: InstanceState, event: Ended, now: UnixTime) -> Iterator[Command]:
    """Decide the outcome of a request whose run has ended."""
    held = instance.requests.of_run(event.run_id)
    if held is None or held.run is None:
        return
    held.generated = max(held.generated, event.num_tokens)
    held.first_token_at = event.first_token_at
    instance.work.serve()
    match event.how:
        case RunEnd.FINISHED:
            instance.urgent.ended(now - held.run.submitted_at)
            yield from _complete(instance, held, event)
        case RunEnd.REFUSED | RunEnd.BROKEN:
            error = event.error or _UNKNOWN
            yield from fail(instance, held, error, DeadLetter(error=error))
        case RunEnd.NOT_ACTIVE:
            # The request is valid; it arrived while the active model was being changed.
            yield from _by_ending(instance, held, held.run.ending or Ending.EVICTED, now)
        case RunEnd.CUT_OFF:
            yield from _on_cut_off(instance, held, event.error or _UNKNOWN, now)
        case RunEnd.ABORTED:
            yield from _by_ending(instance, held, held.run.ending or Ending.CANCELLED, now)
        case RunEnd.DIED:
            yield from _on_death(instance, held, now)


def _on_death(instance: InstanceState, held: Held, now: UnixTime) -> Iterator[Command]:
    instance.lose_engine()  # also if a run reports the death first
    ending = held.run.ending if held.run is not None else None
    if ending in (Ending.STOPPED, Ending.CANCELLED, Ending.EXPIRED):
        yield from _by_ending(instance, held, ending, now)
    elif held.end.at <= now:
        yield from fail_expired(instance, held, RUN)
    elif held.request.attempts.crashes + 1 >= MAX_CRASHES:
        yield from fail(instance, held, _POISON, DeadLetter(error=_POISON))
    else:
        attempts = held.request.attempts
        again = _again(attempts, crashes=attempts.crashes + 1)
        yield from requeue(instance, held, again, RETURNED_AT_CRASH)


def _on_cut_off(
    instance: InstanceState, held: Held, error: ErrorInfo, now: UnixTime
) -> Iterator[Command]:
    """Run the request again, elsewhere at first; after some tries without a token it fails."""
    attempts = held.request.attempts
    has_progress = held.generated > held.request.progress.num_tokens
    breaks = 0 if has_progress else attempts.breaks + 1
    ending = None if held.run is None else held.run.ending
    if ending is None and breaks >= MAX_BREAKS and held.end.at > now:
        message = f"{error.message}; {breaks} tries in a row have ended so, without a token"
        failure = msgspec.structs.replace(error, message=message)
        yield from fail(instance, held, failure, DeadLetter(error=failure))
        return
    attempts = msgspec.structs.replace(attempts, breaks=breaks)
    held.request = msgspec.structs.replace(held.request, attempts=attempts)
    yield from _by_ending(instance, held, ending or Ending.EVICTED, now)


def _by_ending(
    instance: InstanceState, held: Held, ending: Ending, now: UnixTime
) -> Iterator[Command]:
    match ending:
        case Ending.STOPPED:
            yield from _depart(instance, held, "stopped by its producer")
        case Ending.CANCELLED:
            yield from fail(instance, held, CANCELLED)
        case _ if ending is Ending.EXPIRED or held.end.at <= now:
            yield from fail_expired(instance, held, RUN)
        case Ending.EVICTED:
            yield from evict(instance, held, now, "" if held.run is None else held.run.why)
        case Ending.SWAPPED_OUT:
            yield from _swap_out(instance, held, now)


def _complete(instance: InstanceState, held: Held, event: Ended) -> Iterator[Command]:
    totals = instance.totals
    totals.completed += 1
    totals.prompt_tokens += event.prompt_tokens or held.request.prompt_tokens
    totals.output_tokens += event.num_tokens
    yield from _depart(instance, held, "completed", Completion())


def fail(
    instance: InstanceState, held: Held, error: ErrorInfo, *copies: DeadLetter
) -> Iterator[Command]:
    """Deliver a final reply with an error; *copies* go to the dead letters."""
    instance.totals.failed += 1
    yield from _depart(instance, held, f"failed: {error.code}", Failure(error=error), *copies)


def expire(instance: InstanceState, now: UnixTime) -> Iterator[Command]:
    """
    End the held requests that are past their ends, and abort their runs.

    A run that is being ended for another reason ends as expired when the engine has ended it.
    """
    for held in instance.requests.ends.due(now):
        if held.phase in (Phase.WAITING, Phase.RESTING):
            yield from fail_expired(instance, held, WINDOW)
        elif held.phase is Phase.RUNNING:
            yield from abort(instance, held, Ending.EXPIRED)


def fail_expired(instance: InstanceState, held: Held, place: str) -> Iterator[Command]:
    """End a request that has reached its end; the final reply gives its place and its tokens."""
    instance.totals.expired[place] += 1
    if place != RUN and held.rank is Rank.REGULAR:
        _note_first_token(instance, held, instance.now, in_time=False)
    us, request = instance.settings.instance_id, held.request
    num_tokens = instance.requests.generated(held)
    tokens = f"with {num_tokens} of at most {request.sampling.max_tokens} tokens"
    if place == PULL:
        waited_s = max(0.0, instance.now - request.grouped_at)
        where = f"it waited {waited_s:.3f} s in queues until instance {us} pulled it, {tokens}"
    elif place == WINDOW:
        waited_s = max(0.0, instance.now - held.pulled_at)
        where = f"it waited {waited_s:.3f} s on instance {us}, {tokens}"
    else:
        where = f"it ran on instance {us}, {tokens}"
    end = held.end
    if end.at > instance.now:  # its first token came while the run was being aborted
        end = nearest_end(request)
    error = expired_error(end, arrived_at=request.arrived_at, place=where)
    yield from fail(instance, held, error)


def relegate(instance: InstanceState, held: Held) -> Iterator[Command]:
    """The request loses its SLO and waits for room in the relegated queue (QoServe §3.4)."""
    instance.totals.relegated += 1
    _note_first_token(instance, held, instance.now, in_time=False)
    attempts = _again(held.request.attempts, relegated=True)
    queue = relegated_name(held.request.model.base)
    instance.note(held, "relegated", "it cannot meet its deadline")
    yield from _depart(instance, held, "relegated", Requeueing(queue=queue, attempts=attempts))


def hand_back(instance: InstanceState, held: Held) -> Iterator[Command]:
    """Return a request that has not run here to the front of its lane."""
    yield from requeue(instance, held, _again(held.request.attempts), "handed back")


def evict(instance: InstanceState, held: Held, now: UnixTime, why: str = "") -> Iterator[Command]:
    """Requeue a request with its progress; for some time, this instance does not pull it."""
    instance.totals.evicted += 1
    instance.order.hold(return_queue(held.request), now + instance.settings.evict_hold_s)
    attempts = held.request.attempts
    evicted = _again(
        attempts,
        evictions=attempts.evictions + 1,
        evicted_by=instance.settings.instance_id,
        evicted_at=now,
    )
    yield from requeue(instance, held, evicted, "evicted", why)


def requeue(
    instance: InstanceState, held: Held, attempts: Attempts, how: str, why: str = ""
) -> Iterator[Command]:
    """Return a request with its progress to the queue in which it waits to run again."""
    instance.note(held, how, why)
    publication = Requeueing(queue=return_queue(held.request), attempts=attempts)
    yield from _depart(instance, held, how, publication)


def _swap_out(instance: InstanceState, held: Held, now: UnixTime) -> Iterator[Command]:
    """
    Keep the unacknowledged request of an aborted run.

    The request's hop stays the same, since no other instance may run it. A request that this
    instance could not resume is evicted instead.
    """
    if instance.is_cancelled(held):
        yield from fail(instance, held, CANCELLED)
    elif not instance.may_pull or held.request.model.base != instance.model:
        yield from evict(instance, held, now)
    else:
        lease = Lease(
            context_tokens=held.context_tokens,
            until=now + instance.settings.swap_lease_s,
            resume_at=now + (held.run.rest_s if held.run is not None else 0.0),
        )
        instance.note(held, "swapped out", "" if held.run is None else held.run.why)
        instance.requests.swap_out(held, lease, now)
        instance.totals.swapped_out += 1


def on_departed(instance: InstanceState, event: Departed, _now: UnixTime) -> Iterator[Command]:
    """The request is gone; copies that were delivered meanwhile are acknowledged."""
    held = instance.requests.leaving_of(event.number)
    if held is None:
        return
    late = tuple(tag for tag in held.tags if tag not in held.settling)
    instance.renewals.left_with_copies(held)
    instance.requests.settled(event.number)
    if late:
        yield Discard(tags=late)


def on_stranded(instance: InstanceState, event: Stranded, _now: UnixTime) -> Iterator[Command]:
    """Return a request whose outcome cannot be published unchanged to its queue."""
    held = instance.requests.leaving_of(event.number)
    if held is None:
        return
    tags = tuple(held.tags)
    instance.depart(held.request_id, "returned when its outcome could not be published")
    instance.requests.settled(event.number)
    yield Return(number=event.number, tags=tags)


def _depart(
    instance: InstanceState, held: Held, how: str, *publications: Publication
) -> Iterator[Command]:
    run = held.run
    instance.depart(held.request_id, how)
    held.fate = how
    held.settling = tuple(held.tags)
    instance.requests.leave(held)
    instance.work.serve()
    yield Depart(
        number=held.number,
        request=held.request,
        how=how,
        publications=publications,
        tags=held.settling,
        pulled_at=held.pulled_at,
        submitted_at=0.0 if run is None else run.submitted_at,
        run_id=None if run is None else run.run_id,
    )


def _again(attempts: Attempts, **changes: object) -> Attempts:
    """*attempts* of a request that is requeued."""
    return msgspec.structs.replace(attempts, hop=attempts.hop + 1, **changes)


def return_queue(request: QueuedRequest) -> str:
    """Queue in which an interrupted request waits to run again, ahead of its lane's requests."""
    if request.attempts.relegated:
        return relegated_name(request.model.base)
    return LaneKey.parse(request.lane).resume_name
