"""Models that the instance stops to serve, since they were removed from the registry."""

from collections.abc import Iterator

from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.lanes import model_of
from solver.instance.commands import Command, Release, Report, Say
from solver.instance.events import Removed
from solver.instance.operations import call
from solver.instance.scripts import Script, Wait
from solver.instance.state import InstanceState
from solver.planning.lso.operations import Track
from solver.planning.lso.results import LsoFailedError, LsoRefusedError

GRACE_S: Seconds = 10.0
"""
Time for which a removed model is kept in any case: gateways and groupers may still publish requests
that they accepted before.
"""
RETRY_S: Seconds = 1.0
"""Time between two attempts to release a model."""


def on_removed(instance: InstanceState, event: Removed, now: UnixTime) -> Iterator[Command]:
    """Release a model once no request needs it; `Added` ends this."""
    if event.model in instance.models and event.model not in instance.removed:
        instance.removed[event.model] = now
        instance.scripts.start(_release(instance, event.model, now))
        yield Report()


def _release(instance: InstanceState, model: ModelName, removed_at: UnixTime) -> Script:
    def is_removed() -> bool:
        return instance.removed.get(model) == removed_at

    attempt_at = removed_at + GRACE_S
    while is_removed():
        yield Wait(lambda: not is_removed(), attempt_at)
        yield Wait(lambda: not is_removed() or not _is_used(instance, model))
        yield from _attempt(instance, model, removed_at)
        attempt_at = instance.now + RETRY_S


def _attempt(instance: InstanceState, model: ModelName, removed_at: UnixTime) -> Script:
    """Release *model* when no operation runs, unless it is needed again."""
    turn = instance.tracks.join(tuple(Track))
    yield Wait(lambda: instance.tracks.is_first(turn))
    instance.following.swapping += 1  # so that no request is pulled
    yield Wait(lambda: instance.num_pulls == 0)
    if instance.removed.get(model) == removed_at and not _is_used(instance, model):
        yield from _released(instance, model)
    instance.following.swapping -= 1
    instance.tracks.leave(turn)
    instance.work.all()


def _is_used(instance: InstanceState, model: ModelName) -> bool:
    """Return whether the instance holds requests for *model*, or activates it."""
    if instance.following.activating == model:
        return True
    return instance.model == model and not instance.requests.is_empty


def _released(instance: InstanceState, model: ModelName) -> Script:
    """Forget *model*, unless requests for it wait in queues."""
    plan = instance.following.plan
    known = {*instance.noticed, *(plan.work_queues if plan else ())}
    queues = tuple(sorted(queue for queue in known if model_of(queue) == model))
    try:
        yield from call(Release(command=instance.number(), model=model, queues=queues))
    except (LsoFailedError, LsoRefusedError):
        return  # tried again later
    instance.models.pop(model, None)
    instance.removed.pop(model, None)
    instance.noticed = {queue: at for queue, at in instance.noticed.items() if queue not in queues}
    following = instance.following
    if model == following.lost:
        following.lost = None
    if model == following.ordered:
        following.ordered = None
    if instance.model == model:
        following.applied = ()
        instance.serve(None)
    yield Say(event="model.released", fields=(("model", model),))
    yield Report()
