"""An instance without a plan: when it looks for work itself, and which model it activates."""

import math
from collections.abc import Iterator
from zlib import crc32

from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.lanes import model_of
from solver.instance import follow
from solver.instance.commands import Claim, Command, Count, Unclaim
from solver.instance.events import Claimed, Connected, Counted, Lost, Stalled
from solver.instance.state import InstanceState

LOOK_PERIOD_S = 0.5
LEAST_WAIT_S = 1.0
"""Minimum time for which work waits before the instance concludes that no other serves it."""
WAIT_SPREAD_S = 2.0
"""
Range of an additional waiting time that differs for each instance, so that instances do not act
simultaneously.
"""


def has_plan(instance: InstanceState, now: UnixTime) -> bool:
    """Return whether the last plan is recent enough to be followed."""
    following = instance.following
    return following.plan is not None and now - following.plan_at < instance.settings.patience_s


def noticed_model(instance: InstanceState) -> ModelName | None:
    """The servable model that got work most recently, for an instance without a model."""
    recent = sorted(instance.noticed.items(), key=lambda item: -item[1])
    models = (model_of(queue) for queue, _ in recent)
    return next((model for model in models if model in instance.models), None)


def look(instance: InstanceState, now: UnixTime) -> Iterator[Command]:
    """Count the queues of other models while the instance has neither a plan nor work."""
    following = instance.following
    if not _may_adopt(instance, now) or following.counting or now < following.count_at:
        return
    queues = _others(instance)
    if queues:
        following.counting, following.count_at = True, now + LOOK_PERIOD_S
        yield Count(queues=queues)


def next_at(instance: InstanceState) -> UnixTime:
    """Time at which `look` may act without another event."""
    following = instance.following
    if following.counting or not _is_free(instance) or not _others(instance):
        return math.inf
    patience_s = instance.settings.patience_s
    return max(following.busy_at + patience_s, following.plan_at + patience_s, following.count_at)


def on_counted(instance: InstanceState, event: Counted, now: UnixTime) -> Iterator[Command]:
    """Claim the model whose work has waited longest, if it has waited long enough."""
    following = instance.following
    following.counting = False
    following.waiting = {queue: following.waiting.get(queue, now) for queue in event.ready}
    due = [(at, queue) for queue, at in following.waiting.items() if now - at >= _wait_s(instance)]
    if due and _may_adopt(instance, now) and following.claiming is None:
        following.waiting.clear()  # the waiting time restarts after each claim
        following.claiming = model = model_of(min(due)[1])
        if model is not None:
            yield Claim(model=model)


def on_claimed(instance: InstanceState, event: Claimed, now: UnixTime) -> Iterator[Command]:
    """Activate a claimed model, unless a plan or work has arrived meanwhile."""
    if not event.granted:
        instance.following.claiming = None
    elif _may_adopt(instance, now) and event.model in instance.models:
        follow.adopt(instance, event.model)
    else:
        yield from unclaim(instance)


def unclaim(instance: InstanceState) -> Iterator[Command]:
    """Give the claim back; other instances may claim the model then."""
    model, instance.following.claiming = instance.following.claiming, None
    if model is not None:
        yield Unclaim(model=model)


def on_lost(instance: InstanceState, event: Lost, now: UnixTime) -> Iterator[Command]:
    """Void the deliveries of a lost connection; wait the full patience for plans."""
    instance.totals.connections_lost += 1
    instance.requests.void(event.connection)
    _restart_patience(instance, now)
    yield from ()


def on_connected(instance: InstanceState, _event: Connected, now: UnixTime) -> Iterator[Command]:
    """Ask all queues again, since notices may have been missed."""
    instance.order.look_again(now)
    # The leader may have lost its connection also: wait the full patience for its plans.
    _restart_patience(instance, now)
    instance.work.pull = True
    yield from ()


def on_stalled(instance: InstanceState, event: Stalled, now: UnixTime) -> Iterator[Command]:
    """Time in which no message could arrive does not count."""
    following = instance.following
    following.plan_at = min(now, following.plan_at + event.missed_s)
    following.busy_at = min(now, following.busy_at + event.missed_s)
    following.waiting.clear()
    yield from ()


def _restart_patience(instance: InstanceState, now: UnixTime) -> None:
    following = instance.following
    following.plan_at = following.busy_at = now
    following.waiting.clear()


def _may_adopt(instance: InstanceState, now: UnixTime) -> bool:
    """Return whether this instance may activate a model that it selects by waiting work."""
    idle_s = now - instance.following.busy_at
    patient = idle_s >= instance.settings.patience_s
    return patient and _is_free(instance) and not has_plan(instance, now)


def _is_free(instance: InstanceState) -> bool:
    """Return whether the instance has no work, and no reason to keep or change its model."""
    following = instance.following
    return (
        not (
            instance.draining
            or following.swapping
            or following.busy
            or following.ordered is not None
            or instance.model is None
        )
        and instance.requests.is_empty
    )


def _others(instance: InstanceState) -> tuple[str, ...]:
    """Queues that notices named and whose models are not active."""
    return tuple(
        queue
        for queue in instance.noticed
        if (model := model_of(queue)) in instance.models and model != instance.model
    )


def _wait_s(instance: InstanceState) -> Seconds:
    share = crc32(instance.settings.instance_id.encode()) / 2**32
    return LEAST_WAIT_S + share * WAIT_SPREAD_S
