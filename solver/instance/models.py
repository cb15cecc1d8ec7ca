"""
Models that the instance stops to serve: those whose files differ from those of every gateway, and
those that were removed from the registry.
"""

import math
from collections.abc import Iterator

from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.control import GATEWAY_PERIOD_S
from shared.contracts.lanes import model_of
from solver.instance.commands import Command, Release, Report, Say
from solver.instance.events import GatewayReported, Removed
from solver.instance.operations import call, hand_back_window
from solver.instance.scripts import Script, Wait
from solver.instance.state import InstanceState
from solver.planning.lso.operations import Track
from solver.planning.lso.results import LsoFailedError, LsoRefusedError

MEMORY_S: Seconds = 5 * GATEWAY_PERIOD_S
"""Time without a report after which a gateway counts as stopped."""
GRACE_S: Seconds = 10.0
"""
Time for which a removed model is kept in any case: gateways and groupers may still publish requests
that they accepted before.
"""
RETRY_S: Seconds = 1.0
"""Time between two attempts to release a model."""
_ADVICE = "make the registries and model directories of gateways and agents equal"


def on_gateway_reported(
    instance: InstanceState, event: GatewayReported, now: UnixTime
) -> Iterator[Command]:
    """
    Compare the digests of a gateway's models with those of this instance.

    If the gateways differ among each other, the instance serves the model as long as one gateway
    has the same files; requests of the other gateways are refused.
    """
    instance.gateways[event.gateway] = (now, event.digests)
    yield from _compare(instance)


def forget_stopped(instance: InstanceState, now: UnixTime) -> Iterator[Command]:
    """Forget gateways that do not report any more."""
    if next_at(instance) > now:
        return
    recent = [item for item in instance.gateways.items() if item[1][0] + MEMORY_S > now]
    instance.gateways = dict(recent)
    yield from _compare(instance)


def next_at(instance: InstanceState) -> UnixTime:
    """Time at which the first gateway counts as stopped."""
    return min((at for at, _ in instance.gateways.values()), default=math.inf) + MEMORY_S


def _compare(instance: InstanceState) -> Iterator[Command]:
    before = instance.differing
    instance.differing = frozenset(name for name in instance.models if _differs(instance, name))
    if instance.differing == before:
        return
    instance.work.all()
    if added := instance.differing - before:
        fields = (("models", sorted(added)), ("advice", _ADVICE))
        yield Say(event="models.differ", fields=fields, is_error=True)
        if instance.model in added:
            instance.scripts.start(_hand_back(instance))
    if removed := before - instance.differing:
        yield Say(event="models.equal", fields=(("models", sorted(removed)),))


def _differs(instance: InstanceState, model: ModelName) -> bool:
    ours = instance.models[model].digest
    theirs = {each[model] for _, each in instance.gateways.values() if model in each}
    return bool(theirs) and ours not in theirs


def _hand_back(instance: InstanceState) -> Script:
    yield from hand_back_window(instance)


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
