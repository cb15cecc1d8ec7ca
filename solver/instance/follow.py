"""The active model: follows plans and orders, and restarts a dead engine."""

import math
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

from shared.contracts.base import ModelName, UnixTime
from shared.contracts.control import LsoActivate, LsoCommand, LsoOutcome, LsoRun
from shared.contracts.lanes import model_of
from shared.contracts.plans import Segment
from solver.instance import planless
from solver.instance.commands import Answer, Command, Drained, Load, Prepared, Report, Say, Start
from solver.instance.events import (
    Added,
    Draining,
    EngineDied,
    Ordered,
    Planned,
    Profiled,
    Started,
)
from solver.instance.operations import (
    OPERATIONS,
    call,
    check,
    empty,
    hand_back_window,
    sequence,
)
from solver.instance.pull import sources_of
from solver.instance.scripts import Script, Wait
from solver.instance.state import InstanceState
from solver.instance.views import situation
from solver.planning.added_operations import added_operation
from solver.planning.lso.actions import lso_actions
from solver.planning.lso.operations import (
    ORDERED,
    Activate,
    Lso,
    Reason,
    Rule,
    Track,
    Warm,
    because,
)
from solver.planning.lso.results import LsoFailedError, LsoRefusedError, LsoResult, already
from solver.planning.lso.situation import HeadChange

RESTART_PAUSE_S = 1.0
"""Pause between attempts to start a dead engine, or to activate a model on an empty engine."""
COPIES_S = 5.0
"""Time for which an instance that ends waits for copies of renewed requests."""
NOTICE_MEMORY_S = 300.0
"""Time after its last notice for which a queue that no plan names is pulled from."""


def follow(instance: InstanceState, now: UnixTime) -> None:
    """Begin what the plan, an order or the state of the engine requires."""
    following = instance.following
    set_sources(instance, now)
    if following.busy or instance.draining or not following.started:
        return
    if not instance.engine.alive:
        _begin(instance, _revive(instance))
        return
    target = _target(instance, now)
    if target is None:
        return
    planned = _segments(instance)
    queue = planned if planned and planned[0].model == target else (Segment(model=target),)
    if target != instance.model:
        if now >= following.paused_until and not following.retries.rests(target, now):
            _begin(instance, _try(instance, queue))
    elif _shape(queue) != _shape(following.applied):
        _begin(instance, _apply(instance, queue))


def next_at(instance: InstanceState, now: UnixTime) -> UnixTime:
    """Time at which `follow` may act without another event."""
    following = instance.following
    times = (
        following.paused_until,
        following.retries.next_at,
        following.plan_at + instance.settings.patience_s if following.plan else math.inf,
    )
    return min((at for at in times if at > now), default=math.inf)


def adopt(instance: InstanceState, model: ModelName) -> None:
    """Activate a model whose work no instance serves; the instance has claimed the model."""
    _begin(instance, _adopt(instance, model))


def _begin(instance: InstanceState, script: Generator[Command | Wait, Any, None]) -> None:
    def alone() -> Script:
        instance.following.busy = True
        yield from script
        instance.following.busy = False
        instance.work.all()

    instance.following.busy = True
    instance.scripts.start(alone())


def _target(instance: InstanceState, now: UnixTime) -> ModelName | None:
    """The model that should be active now, by the operator's order or the plan."""
    following = instance.following
    if following.ordered is not None:
        return following.ordered
    if planless.has_plan(instance, now):
        segments = _segments(instance)
        return segments[0].model if segments else instance.model or following.lost
    if instance.model is not None:
        return instance.model
    return planless.noticed_model(instance) or following.lost


def _segments(instance: InstanceState) -> tuple[Segment, ...]:
    """Segments of the plan whose models this instance may serve."""
    plan = instance.following.plan
    segments = plan.queue.segments if plan is not None else ()
    return tuple(segment for segment in segments if segment.model in instance.models)


def _apply(
    instance: InstanceState, queue: tuple[Segment, ...]
) -> Generator[Command | Wait, Any, None]:
    """Apply a new virtual queue of the active model by the table of QLM §5."""
    following = instance.following
    change = _change(instance, queue)
    following.applied = queue
    set_sources(instance, instance.now)
    yield from _execute(instance, lso_actions(change, situation(instance, instance.now)))


def _try(
    instance: InstanceState, queue: tuple[Segment, ...]
) -> Generator[Command | Wait, Any, None]:
    """
    Swap to the first model of *queue*; after a failure, set the time of the next attempt.

    Without an active model, the next attempt follows after `RESTART_PAUSE_S`.
    """
    following, head = instance.following, queue[0].model
    result = yield from _swap(instance, queue)
    if result.ok:
        following.retries.succeeded(head)
    elif instance.model is None:
        following.paused_until = instance.now + RESTART_PAUSE_S
    else:
        pause_s = following.retries.failed(head, instance.now)
        fields = (("model", head), ("serving", instance.model), ("again_in_s", pause_s))
        yield Say(event="model.not_activated", fields=fields, is_error=True)


def _swap(
    instance: InstanceState, queue: tuple[Segment, ...], *, reason: Reason | None = None
) -> Generator[Command | Wait, Any, LsoResult]:
    """Empty the instance and activate the first model of *queue*; return the result."""
    following = instance.following
    lsos = lso_actions(_change(instance, queue), situation(instance, instance.now))
    if reason is not None:
        lsos = tuple(replace(lso, reason=reason) for lso in lsos)
    following.swapping += 1  # so that no request is admitted from here on
    try:
        results = yield from _execute(instance, lsos)
    finally:
        following.swapping -= 1
        instance.work.all()
    for lso, result in results:
        if isinstance(lso, Activate):
            if result.ok:
                following.applied = queue
            return result
    failed = [result for _, result in results if not result.ok]
    return failed[-1] if failed else already(f"{queue[0].model} is active")


def _execute(
    instance: InstanceState, lsos: tuple[Lso, ...]
) -> Generator[Command | Wait, Any, list[tuple[Lso, LsoResult]]]:
    """Execute the operations of a plan; do not wait for background operations."""
    ahead = [lso for lso in lsos if not lso.background]
    results = yield from sequence(instance, *ahead)
    if all(result.outcome is not LsoOutcome.FAILED for result in results):
        # Operations of each track are started separately, so that an operation waits only for
        # operations on its track.
        for tracks in dict.fromkeys(lso.tracks for lso in lsos if lso.background):
            later = [lso for lso in lsos if lso.background and lso.tracks == tracks]
            instance.scripts.start(_background(instance, later))
    return list(zip(ahead, results, strict=False))


def _background(instance: InstanceState, lsos: list[Lso]) -> Script:
    yield from sequence(instance, *lsos)


def _adopt(instance: InstanceState, model: ModelName) -> Generator[Command | Wait, Any, None]:
    yield Say(event="model.adopted", fields=(("model", model), ("instead_of", instance.model)))
    yield from _try(instance, (Segment(model=model),))
    yield from planless.unclaim(instance)


def _revive(instance: InstanceState) -> Generator[Command | Wait, Any, None]:
    """Restart a dead engine, and activate its former model."""
    following = instance.following
    instance.totals.crashes += 1
    fields = (("instance_id", instance.settings.instance_id), ("runs", instance.requests.num_runs))
    yield Say(event="engine.died", fields=fields, is_error=True)
    turn = instance.tracks.join(tuple(Track))
    yield Wait(lambda: instance.tracks.is_first(turn))
    following.swapping += 1
    # Return the waiting requests, so that other instances can serve them if this engine does not
    # restart.
    yield from hand_back_window(instance)
    logged = ""  # the reason is logged when it changes: the engine may be away for hours
    while not instance.engine.alive and not instance.draining:
        try:
            yield from call(Start(command=instance.number()))
            yield Wait(lambda: instance.engine.alive, instance.now + RESTART_PAUSE_S)
        except (LsoFailedError, LsoRefusedError) as error:
            if str(error) != logged:
                logged = str(error)
                yield Say(event="engine.restart_failed", fields=(("error", logged),), is_error=True)
            yield Wait(lambda: instance.draining, instance.now + RESTART_PAUSE_S)
    if not instance.draining and instance.model is not None:
        yield from _reactivate(instance, instance.model)
    following.swapping -= 1
    instance.tracks.leave(turn)


def _reactivate(instance: InstanceState, model: ModelName) -> Generator[Command | Wait, Any, None]:
    """
    Activate the former model of a restarted engine.

    After a failure, the next plan or the operator's next order selects the model.
    """
    try:
        yield from call(Load(command=instance.number(), model=model))
    except (LsoFailedError, LsoRefusedError) as error:
        fields = (("model", model), ("error", str(error)))
        yield Say(event="engine.restart_failed", fields=fields, is_error=True)
        instance.following.lost = model
        instance.serve(instance.engine.model)
        instance.following.applied = ()
    else:
        yield Say(event="engine.restarted", fields=(("model", model),))


def on_started(instance: InstanceState, event: Started, _now: UnixTime) -> Iterator[Command]:
    """Activate the first model, then load the warm models while the instance serves."""
    instance.scripts.start(_prepare(instance, event))
    yield from ()


def _prepare(instance: InstanceState, event: Started) -> Script:
    if event.initial is not None:
        reason = because(Rule.INITIAL, model=event.initial)
        (result,) = yield from sequence(instance, Activate(model=event.initial, reason=reason))
        yield Prepared(result=result)
    instance.following.started = True
    instance.work.all()
    for model in event.warm:
        reason = because(Rule.SET_WARM, model=model)
        yield from sequence(instance, Warm(model=model, reason=reason))
    yield Prepared(result=None)


def on_planned(instance: InstanceState, event: Planned, now: UnixTime) -> Iterator[Command]:
    """Store a plan; ignore a plan with a lower epoch, e.g. of a stalled former leader."""
    following, plan = instance.following, event.plan
    if following.plan is not None and plan.epoch < following.plan.epoch:
        return
    if following.plan is None or plan.epoch > following.plan.epoch:
        following.ordered = None
    following.plan, following.plan_at = plan, now
    instance.work.follow = True
    yield from ()


def on_profiled(instance: InstanceState, event: Profiled, _now: UnixTime) -> Iterator[Command]:
    """Store the newest profile of each model on this kind of engine."""
    profile = event.profile
    known = instance.profiles.get(profile.model)
    if known is None or known.version <= profile.version:
        instance.profiles[profile.model] = profile
        if profile.model == instance.model:
            instance.predict()
    yield from ()


def on_added(instance: InstanceState, event: Added, _now: UnixTime) -> Iterator[Command]:
    """Serve another model from now on."""
    instance.models[event.model.model] = event.model
    instance.removed.pop(event.model.model, None)
    instance.work.follow = True
    yield from ()


def on_engine_died(
    instance: InstanceState, _event: EngineDied, _now: UnixTime
) -> Iterator[Command]:
    """Restart the engine; its runs end by events of their own."""
    instance.lose_engine()
    yield from ()


def on_draining(instance: InstanceState, event: Draining, _now: UnixTime) -> Iterator[Command]:
    """Hand back all requests; the instance pulls no more."""
    instance.draining = True
    instance.stopping |= event.drain_s is not None
    instance.work.all()
    yield Report()
    instance.scripts.start(_drain(instance, event))


def _drain(instance: InstanceState, event: Draining) -> Script:
    if event.drain_s is not None:
        yield from empty(instance, event.drain_s)
        yield Wait(lambda: instance.requests.is_empty)
        # A copy that stays in the inbox would be served once more.
        copies_s = COPIES_S if instance.renewals.are_under_way else 0.0
        yield Wait(lambda: not instance.renewals.are_under_way, instance.now + copies_s)
        instance.renewals.give_up()
        # A request that came from the inbox instead of a copy has been handed back meanwhile.
        yield Wait(lambda: instance.requests.is_empty)
        yield Drained()
    else:
        yield from hand_back_window(instance)


def on_ordered(instance: InstanceState, event: Ordered, _now: UnixTime) -> Iterator[Command]:
    """Execute an operator's order; an equal order in progress gets the same answer."""
    instance.scripts.start(_answer(instance, event.order))
    yield from ()


def _answer(instance: InstanceState, order: LsoCommand) -> Script:
    answers, key = instance.answers, order.command_id
    if key and key in answers:
        yield Wait(lambda: answers.get(key) is not None)
    else:
        if key:
            answers[key] = None
        try:
            result = yield from _obey(instance, order)
        except LsoRefusedError as error:
            result = LsoResult(outcome=LsoOutcome.REFUSED, message=str(error))
        if key:
            instance.remember(key, result)
            result = answers[key] or result
        yield Answer(order=order, instance_id=instance.settings.instance_id, result=result)
        return
    known = answers[key]
    if known is not None:
        yield Answer(order=order, instance_id=instance.settings.instance_id, result=known)


def _obey(instance: InstanceState, order: LsoCommand) -> Generator[Command | Wait, Any, LsoResult]:
    ours = instance.settings.instance_id
    if order.instance_id != ours:
        raise LsoRefusedError(f"this is instance {ours!r}, not {order.instance_id!r}")
    if isinstance(order, LsoRun):
        lso = added_operation(instance.operations, order.operation).ordered(order.arguments)
        (result,) = yield from sequence(instance, lso)
        return result
    if not isinstance(order, LsoActivate):
        (result,) = yield from sequence(instance, OPERATIONS[type(order)](order))
        return result
    check(instance, order.model)
    if instance.draining:
        raise LsoRefusedError("the instance is draining")
    following = instance.following
    following.ordered = order.model
    result = yield from _swap(instance, (Segment(model=order.model),), reason=ORDERED)
    if not result.ok:
        following.ordered = None
        return result
    message = f"{result.message}; the model is kept until the next plan selects another"
    return replace(result, message=message)


def _change(instance: InstanceState, queue: tuple[Segment, ...]) -> HeadChange:
    applied = instance.following.applied
    return HeadChange(old_head=applied[0] if applied else None, queue=queue)


def set_sources(instance: InstanceState, now: UnixTime) -> None:
    """Pull from the queues of the active model that the plan and notices name."""
    if instance.model is None:
        return
    instance.noticed = {
        queue: at for queue, at in instance.noticed.items() if now - at < NOTICE_MEMORY_S
    }
    plan = instance.following.plan
    known = {*instance.noticed, *(plan.work_queues if plan else ())}
    queues = {queue for queue in known if model_of(queue) == instance.model}
    if plan is not None:
        queues.update(
            quota.lane
            for segment in plan.queue.segments
            if segment.model == instance.model
            for quota in segment.lanes
        )
    settings = instance.settings
    instance.order.set_sources(sources_of(settings.instance_id, queues, settings.layout), now)
    instance.work.pull = True


def _shape(queue: tuple[Segment, ...]) -> tuple[tuple[ModelName, frozenset[str]], ...]:
    """Identity of a virtual queue: its models in order, each with its lanes, without quotas."""
    return tuple(
        (segment.model, frozenset(quota.lane for quota in segment.lanes)) for segment in queue
    )
