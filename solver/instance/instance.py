"""One serving instance as a state machine: its only entry point is `Instance.handle`."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shared.contracts.base import RunId, UnixTime
from solver.instance import end, follow, models, planless, pull
from solver.instance.admission import admit
from solver.instance.commands import Command, Say, WakeAt
from solver.instance.events import (
    Added,
    Begun,
    Cancelled,
    Claimed,
    Connected,
    Counted,
    Delivered,
    Departed,
    Done,
    Draining,
    Ended,
    EngineDied,
    Event,
    Failed,
    Loaded,
    Lost,
    Noticed,
    Ordered,
    Outgrown,
    Planned,
    Profiled,
    PullEnded,
    Removed,
    Rendered,
    Renewed,
    Retired,
    Retiring,
    RunStopped,
    Stalled,
    Started,
    Stranded,
    Unrenewed,
    Wake,
)
from solver.instance.operations import start_alone
from solver.instance.renewal import renew
from solver.instance.request import Ending, Phase
from solver.instance.state import InstanceState, cancel_proof, cancel_proofs, stored_proof
from solver.planning.lso.operations import Evict, Rule, because

Handler = Callable[[InstanceState, Any, UnixTime], Iterator[Command]]


class Instance(InstanceState):
    """
    The control of one instance, without data and IO.

    Equal events at equal times give equal commands.
    """

    def handle(self, event: Event, now: UnixTime) -> list[Command]:
        """
        Process one event.

        Args:
            now: Unix seconds; never less than at the last call.

        Returns:
            Commands, to be begun in this order.
        """
        self.now = now
        commands = list(HANDLERS[type(event)](self, event, now))
        commands.extend(_settle(self, now))
        return commands


def _settle(instance: InstanceState, now: UnixTime) -> Iterator[Command]:
    """Do all that has become possible: steps of operations, admission, pulls."""
    if instance.wake_at <= now:
        _wake(instance, now)  # another event was handled just before the `Wake`
    yield from end.expire(instance, now)
    while True:
        yield from instance.scripts.advance(now)
        work = instance.work
        if work.follow:
            work.follow = False
            follow.follow(instance, now)
        elif work.admit:
            work.admit = False
            yield from admit.admit(instance, now)
        elif work.pull:
            work.pull = False
            yield from pull.pull(instance, now)
        elif not instance.scripts.is_due(now):
            break
    yield from renew.renew(instance, now)
    if instance.requests.num_held:
        instance.following.busy_at = now
    else:
        yield from planless.look(instance, now)
    at = _next_at(instance, now)
    if at != instance.wake_at:
        instance.wake_at = at
        if at < math.inf:
            yield WakeAt(at=at)


def _next_at(instance: InstanceState, now: UnixTime) -> UnixTime:
    """Time at which the instance acts without another event."""
    return min(
        instance.scripts.deadline(),
        pull.next_at(instance, now),
        follow.next_at(instance, now),
        planless.next_at(instance),
        renew.next_at(instance),
        instance.requests.ends.next_at,
        _lease_at(instance, now),
    )


def _lease_at(instance: InstanceState, now: UnixTime) -> UnixTime:
    leases = (held.lease for held in instance.requests.swapped_out if held.lease is not None)
    times = (at for lease in leases for at in (lease.resume_at, lease.until) if at > now)
    return min(times, default=math.inf)


def _on_wake(instance: InstanceState, _event: Wake, now: UnixTime) -> Iterator[Command]:
    """Look at everything that depends on time."""
    _wake(instance, now)
    yield from ()


def _wake(instance: InstanceState, now: UnixTime) -> None:
    """End rests and leases, and mark all work."""
    instance.wake_at = math.inf
    _end_leases(instance, now)
    instance.work.all()


def _end_leases(instance: InstanceState, now: UnixTime) -> None:
    reason = because(Rule.LEASE_ENDED, lease_s=instance.settings.swap_lease_s)
    for held in instance.requests.swapped_out:
        if held.lease is None:
            continue
        if held.lease.until <= now:
            lso = Evict(request_ids=(held.request_id,), reason=reason)
            start_alone(instance, f"end the lease of {held.number}", lso)
        elif held.phase is Phase.RESTING and held.lease.resume_at <= now:
            instance.requests.wake(held)


def _on_loaded(instance: InstanceState, event: Loaded, now: UnixTime) -> Iterator[Command]:
    """Take over the state of the engine and the lengths of answers."""
    before, instance.engine = instance.engine, event.engine
    instance.requests.lengths = event.lengths
    if event.engine.alive != before.alive or instance.model is None:
        instance.work.follow = True
    if (event.engine.max_running, event.engine.kv_capacity_tokens) != (
        before.max_running,
        before.kv_capacity_tokens,
    ):
        instance.work.admit = instance.work.pull = True
    if instance.orders_prefills:
        instance.work.serve()  # work that could wait may be urgent now
        if instance.holding.look(now):
            holding = instance.holding
            fields = (("holds", not holding.prefers_passing), ("compared", holding.compared))
            yield Say(event="holding.changed", fields=fields)
        instance.urgent.mean_running(now, instance.room.num_interactive)
        end.note_prefilled(instance, now)
    admit.hand_back_late(instance, now)


def _on_cancelled(instance: InstanceState, event: Cancelled, _now: UnixTime) -> Iterator[Command]:
    """End the request if this instance holds it, and store the cancellation for later pulls."""
    if event.stored_of is not None:
        proof = stored_proof(event.stored_of)
    elif event.reply_to is None and event.user is None:
        return  # any producer could have sent it
    else:
        proof = cancel_proof(event.reply_to, event.user)
    instance.cancel(event.request_id, proof)
    held = instance.requests.find(event.request_id)
    if held is None or proof not in cancel_proofs(held.request):
        return
    if held.run is not None:
        yield from end.abort(instance, held, Ending.CANCELLED)
    else:
        yield from end.fail(instance, held, end.CANCELLED)


def _on_run_stopped(
    instance: InstanceState, event: RunStopped, _now: UnixTime
) -> Iterator[Command]:
    """End a run that its producer does not need."""
    held = instance.requests.of_run(RunId(event.run_id))
    if held is not None and held.request_id == event.request_id:
        yield from end.abort(instance, held, Ending.STOPPED)


def _on_answered(
    instance: InstanceState, event: Done | Failed, _now: UnixTime
) -> Iterator[Command]:
    """Continue the operation that made the call."""
    instance.scripts.answer(event)
    yield from ()


HANDLERS: Mapping[type[Event], Handler] = {
    Delivered: pull.on_delivered,
    PullEnded: pull.on_pull_ended,
    Noticed: pull.on_noticed,
    Retiring: pull.on_retiring,
    Retired: pull.on_retired,
    Renewed: renew.on_renewed,
    Unrenewed: renew.on_unrenewed,
    Rendered: end.on_rendered,
    Begun: end.on_begun,
    Outgrown: end.on_outgrown,
    Ended: end.on_ended,
    Departed: end.on_departed,
    Stranded: end.on_stranded,
    Loaded: _on_loaded,
    EngineDied: follow.on_engine_died,
    Started: follow.on_started,
    Planned: follow.on_planned,
    Profiled: follow.on_profiled,
    Ordered: follow.on_ordered,
    Draining: follow.on_draining,
    Added: follow.on_added,
    Removed: models.on_removed,
    Cancelled: _on_cancelled,
    RunStopped: _on_run_stopped,
    Done: _on_answered,
    Failed: _on_answered,
    Lost: planless.on_lost,
    Connected: planless.on_connected,
    Stalled: planless.on_stalled,
    Counted: planless.on_counted,
    Claimed: planless.on_claimed,
    Wake: _on_wake,
}
"""Kind of event -> its handler."""
