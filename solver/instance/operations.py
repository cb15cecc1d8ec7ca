"""LLM serving operations: the steps of each kind, and their order."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shared.contracts.base import Message, ModelName, RequestId, Seconds
from shared.contracts.control import (
    EvictRequest,
    LsoCheckpoint,
    LsoClear,
    LsoOutcome,
    LsoPreempt,
    LsoPull,
    LsoSet,
    LsoSwapIn,
    LsoSwapOut,
    LsoWarm,
)
from shared.contracts.telemetry import Capability, ModelActivated, ModelState, Residency
from solver.instance import end, pull
from solver.instance.admission import admit
from solver.instance.commands import (
    Call,
    Command,
    DropCaches,
    Limit,
    Load,
    LoadWarm,
    PreemptNow,
    Record,
    Report,
    ReportActivation,
    Unload,
)
from solver.instance.events import Done, Failed
from solver.instance.request import Ending, Held, Phase
from solver.instance.scripts import Script, Wait
from solver.instance.state import NO_LIMIT, Activated, InstanceState
from solver.instance.views import kv_bytes, pull_state
from solver.planning.lso.operations import (
    Activate,
    Checkpoint,
    ClearCaches,
    Cool,
    Evict,
    Lso,
    Preempt,
    Pull,
    Rule,
    SetScheduling,
    SwapIn,
    SwapOut,
    Warm,
    because,
)
from solver.planning.lso.results import LsoFailedError, LsoRefusedError, LsoResult, already

Steps = Generator[Command | Wait, "bool | Done | Failed", LsoResult]
"""
Steps of one operation; they return its result.

They raise `LsoRefusedError` before any change, or `LsoFailedError`.
"""


@dataclass(slots=True, eq=False)
class Operation:
    """One operation from its beginning to its result."""

    lso: Lso
    result: LsoResult | None = None
    """None until the operation has ended."""


def start(instance: InstanceState, lso: Lso) -> Operation:
    """Execute *lso* when its tracks are free."""
    operation = Operation(lso)
    instance.scripts.start(_execute(instance, operation))
    return operation


def sequence(instance: InstanceState, *lsos: Lso) -> Generator[Wait, bool, list[LsoResult]]:
    """Execute operations in order; stop at the first failure."""
    results: list[LsoResult] = []
    for lso in lsos:
        operation = start(instance, lso)
        yield Wait(partial(_has_ended, operation))
        assert operation.result is not None  # noqa: S101 - the condition above
        results.append(operation.result)
        if operation.result.outcome is LsoOutcome.FAILED:
            break
    return results


def _has_ended(operation: Operation) -> bool:
    return operation.result is not None


def start_alone(instance: InstanceState, purpose: str, *lsos: Lso) -> None:
    """Execute operations for *purpose*, unless earlier ones for it have not ended."""

    def script() -> Script:
        yield from sequence(instance, *lsos)
        instance.purposes.discard(purpose)

    if lsos and purpose not in instance.purposes:
        instance.purposes.add(purpose)
        instance.scripts.start(script())


def _execute(instance: InstanceState, operation: Operation) -> Script:
    lso = operation.lso
    turn = instance.tracks.join(lso.tracks)
    yield Wait(lambda: instance.tracks.is_first(turn))
    operation.result = yield from perform(instance, lso)
    instance.tracks.leave(turn)
    instance.work.all()


def perform(instance: InstanceState, lso: Lso) -> Steps:
    """Execute *lso* inside the tracks that the caller has, and report it."""
    yield Record(lso=lso)
    begun_at = instance.now
    try:
        done = yield from _steps_of(instance, type(lso))(instance, lso)
    except LsoRefusedError as error:
        done = LsoResult(outcome=LsoOutcome.REFUSED, message=str(error))
    except LsoFailedError as error:
        done = LsoResult(outcome=LsoOutcome.FAILED, message=str(error))
    result = replace(done, duration_s=instance.now - begun_at)
    yield Record(lso=lso, result=result)
    return result


def _steps_of(instance: InstanceState, kind: type[Lso]) -> Callable[[InstanceState, Any], Steps]:
    own = STEPS.get(kind)
    if own is not None:
        return own
    return next(each.steps for each in instance.operations.values() if each.lso is kind)


def call(command: Call) -> Generator[Command | Wait, "bool | Done | Failed", Done]:
    """
    Execute a call of the engine.

    Raises:
        LsoRefusedError: Nothing was changed.
        LsoFailedError: The call failed.
    """
    answer = yield command
    if isinstance(answer, Failed):
        raise (LsoRefusedError if answer.refused else LsoFailedError)(answer.message)
    assert isinstance(answer, Done)  # noqa: S101 - scripts get the answer of a call
    return answer


def hand_back_window(instance: InstanceState) -> Generator[Command | Wait, Any, None]:
    """Return all waiting requests to their queues, after the pulls in progress."""
    yield Wait(lambda: instance.num_pulls == 0)
    for held in instance.requests:
        if held.run is None:
            if held.lease is not None:
                yield from end.evict(instance, held, instance.now)
            else:
                yield from end.hand_back(instance, held)


def empty(instance: InstanceState, drain_s: Seconds | None) -> Generator[Command | Wait, Any, int]:
    """Hand back waiting requests, let runs finish for *drain_s*, and evict the others."""
    yield from hand_back_window(instance)
    deadline = {} if drain_s is None else {"deadline": instance.now + drain_s}
    yield Wait(lambda: not instance.requests.num_runs, **deadline)
    left = tuple(held.request_id for held in instance.requests.runs)
    if left:
        reason = because(Rule.DRAIN_OVER, drain_s=drain_s or 0.0)
        yield from perform(instance, Evict(request_ids=left, reason=reason))
    yield Wait(lambda: not instance.requests.num_runs)
    return len(left)


def _evict(instance: InstanceState, lso: Evict) -> Steps:
    found = [instance.requests.find(name) for name in lso.request_ids]
    held = [each for each in found if each is not None and (each.run or each.lease)]
    if not held:
        return _nothing_runs(instance, lso.request_ids)
    for each in held:
        if each.run is not None:
            yield from end.abort(instance, each, Ending.EVICTED, why=lso.reason.text)
        else:
            yield from end.evict(instance, each, instance.now, lso.reason.text)
    yield Wait(lambda: all(_is_over(each) for each in held))
    evicted = [each for each in held if each.fate == "evicted"]
    if not evicted:
        return already(f"{_names(lso.request_ids)} had already ended")
    tokens = sum(each.context_tokens for each in evicted)
    return LsoResult(
        message=f"{len(evicted)} requeued with their progress; {tokens} tokens must be computed "
        "again",
        num_bytes=kv_bytes(instance, tokens),
    )


def _swap_out(instance: InstanceState, lso: SwapOut) -> Steps:
    held = instance.requests.find(lso.request_id)
    if held is not None and held.lease is not None:
        return already(f"{lso.request_id} is already swapped out")
    if held is None or held.run is None:
        return _nothing_runs(instance, (lso.request_id,))
    if instance.draining or instance.following.swapping:
        doing = "drains" if instance.draining else "changes its model"
        raise LsoRefusedError(
            f"the instance {doing} and could not resume {lso.request_id}; evict it instead"
        )
    lease_s = instance.settings.swap_lease_s
    if lso.rest_s > lease_s:
        raise LsoRefusedError(
            f"{lso.request_id} cannot rest for {lso.rest_s:g} s: its lease ends after "
            f"{lease_s:g} s (lso.swap_lease_s), after which the request is evicted"
        )
    why = lso.reason.text
    yield from end.abort(instance, held, Ending.SWAPPED_OUT, why=why, rest_s=lso.rest_s)
    yield Wait(lambda: held.run is None or _is_over(held))
    if held.lease is None:
        if held.fate == end.RETURNED_AT_CRASH:
            raise LsoFailedError(
                f"the engine crashed while {lso.request_id} ran; the request was requeued"
            )
        return already(f"{lso.request_id} had already ended: {held.fate}")
    tokens = held.lease.context_tokens
    return LsoResult(
        message=f"removed from the engine with {tokens} tokens; this instance resumes the request "
        "when there is room",
        num_bytes=kv_bytes(instance, tokens),
    )


def _swap_in(instance: InstanceState, lso: SwapIn) -> Steps:
    held = instance.requests.find(lso.request_id)
    if held is not None and held.run is not None:
        return already(f"{lso.request_id} is running")
    if held is None:
        return _nothing_runs(instance, (lso.request_id,))
    if held.lease is None:
        raise LsoRefusedError(f"{lso.request_id} waits in the window and was never swapped out")
    if (refusal := admit.refusal(instance, held)) is not None:
        raise LsoRefusedError(refusal)
    tokens = held.lease.context_tokens
    yield from admit.begin(instance, held, instance.now)
    return LsoResult(message=f"resumed with {tokens} tokens", num_bytes=kv_bytes(instance, tokens))


def _checkpoint(instance: InstanceState, lso: Checkpoint) -> Steps:
    yield from ()  # no step takes time
    require(instance, Capability.CHECKPOINT, "keep KV in host memory")
    held = instance.requests.find(lso.request_id)
    if held is None:
        return _nothing_runs(instance, (lso.request_id,))
    if instance.engine.host_kv_capacity_bytes == 0:
        raise LsoRefusedError(
            f"the engine keeps no KV of {instance.model} in host memory; the engine's log has the "
            "reason"
        )
    if held.checkpointed:
        return already(f"{lso.request_id} is checkpointed")
    held.checkpointed = True
    if held.run is not None:
        return LsoResult(
            message="KV is kept from the next run on; to begin now, swap the request out and in"
        )
    return LsoResult(message="KV is kept, beginning with the first run on this instance")


def _clear(instance: InstanceState, _lso: ClearCaches) -> Steps:
    before = instance.engine.host_kv_bytes
    yield from call(DropCaches(command=instance.number()))
    return LsoResult(message="all KV was dropped except that of running requests", num_bytes=before)


def _pull(instance: InstanceState, lso: Pull) -> Steps:
    if instance.draining:
        raise LsoRefusedError("the instance is draining")
    if instance.model is None or instance.following.swapping:
        raise LsoRefusedError("no model is active")
    room = pull_state(instance)
    if not room.room:
        raise LsoRefusedError(
            f"no room: {room.requests} of {room.max_requests} requests, {room.backlog_s:.3g} of "
            f"{room.max_backlog_s:g} s, {room.tokens} of {room.max_tokens} tokens"
        )
    for queue in instance.order.queues:
        instance.order.nonempty(queue, instance.now)
    pulled = 0
    while pulled < lso.count and (source := pull.next_source(instance, instance.now)) is not None:
        before = instance.totals.pulled
        yield pull.get(instance, source.queue)
        yield Wait(partial(_is_pulled, instance, source.queue, instance.pulls[source.queue]))
        pulled = min(lso.count, pulled + instance.totals.pulled - before)
    if not pulled:
        queues = len(instance.order.queues)
        return already(f"no request that may be pulled waits in {queues} queues")
    return LsoResult(message=f"{pulled} pulled")


def _is_pulled(instance: InstanceState, queue: str, number: int) -> bool:
    """Return whether one of *number* pulls from *queue* has ended."""
    return instance.pulls[queue] < number


def _preempt(instance: InstanceState, _lso: Preempt) -> Steps:
    require(instance, Capability.LAYER_PREEMPTION, "preempt inside a forward pass")
    done = yield from call(PreemptNow(command=instance.number()))
    if done.acted:
        return LsoResult(message="the best-effort part is dropped at the next safepoint")
    return already("no forward pass with best-effort work was running")


def _set(instance: InstanceState, lso: SetScheduling) -> Steps:
    require(instance, Capability.SCHEDULING, "change its limits while it runs")
    if lso.token_budget is None and lso.max_running is None:
        raise LsoRefusedError("nothing to set: give a token budget or a limit of running requests")
    before = instance.limits
    limits = (lso.token_budget or before[0], lso.max_running or before[1])
    if limits == before:
        return already("these limits are already set")
    yield from call(Limit(command=instance.number(), token_budget=limits[0], max_running=limits[1]))
    instance.limits = limits
    return LsoResult(
        message=f"token budget at most {_limit(limits[0])}, running requests at most "
        f"{instance.engine.max_running}"
    )


def _activate(instance: InstanceState, lso: Activate) -> Steps:
    model, following = lso.model, instance.following
    check(instance, model)
    if instance.model == instance.engine.model == model and instance.engine.alive:
        return already(f"{model} is active")
    if instance.draining:
        raise LsoRefusedError("the instance is draining")
    if instance.model is not None:
        require(instance, Capability.MODEL_SWAP, "change its model")
    old, before, begun_at = instance.model, _state_of(instance, model), instance.now
    activating, following.activating = following.activating, model
    following.swapping += 1
    try:
        yield Report()
        num_evicted = yield from empty(instance, lso.drain_s if old is not None else 0.0)
        try:
            done = yield from call(Load(command=instance.number(), model=model))
        finally:
            # After a failure, the active model is the one that the engine reports.
            instance.serve(instance.engine.model)
        following.activated = Activated(begun_at=begun_at, ended_at=instance.now)
        instance.totals.swaps += old is not None
        following.busy_at = instance.now
    finally:
        following.swapping -= 1
        following.activating = activating
        instance.work.all()
    yield ReportActivation(
        activated=ModelActivated(
            instance_id=instance.settings.instance_id,
            model=model,
            source=before.residency,
            duration_s=done.duration_s,
            at=instance.now,
            path=before.path,
        )
    )
    return LsoResult(
        message=f"active from {before.residency.value} in {done.duration_s:.3g} s"
        + (f", {num_evicted} evicted" if num_evicted else ""),
        num_bytes=instance.models[model].weight_bytes,
    )


def _warm(instance: InstanceState, lso: Warm) -> Steps:
    check(instance, lso.model)
    require(instance, Capability.WARM_START, "load models into host memory ahead of time")
    if (residency := _state_of(instance, lso.model).residency) is not Residency.COLD:
        return already(f"{lso.model} is {residency.value}")
    done = yield from call(LoadWarm(command=instance.number(), model=lso.model))
    return LsoResult(
        message=f"warm in {done.duration_s:.3g} s",
        num_bytes=instance.models[lso.model].weight_bytes,
    )


def _cool(instance: InstanceState, lso: Cool) -> Steps:
    check(instance, lso.model)
    require(instance, Capability.WARM_START, "load models into host memory ahead of time")
    residency = _state_of(instance, lso.model).residency
    if residency is Residency.ACTIVE:
        raise LsoRefusedError(f"{lso.model} is active")
    if residency is Residency.COLD:
        return already(f"{lso.model} is cold")
    yield from call(Unload(command=instance.number(), model=lso.model))
    return LsoResult(message="cold", num_bytes=instance.models[lso.model].weight_bytes)


STEPS: Mapping[type[Lso], Callable[[InstanceState, Any], Steps]] = {
    Evict: _evict,
    SwapOut: _swap_out,
    SwapIn: _swap_in,
    Checkpoint: _checkpoint,
    ClearCaches: _clear,
    Pull: _pull,
    Preempt: _preempt,
    SetScheduling: _set,
    Activate: _activate,
    Warm: _warm,
    Cool: _cool,
}
"""Kind of operation -> its steps."""


OPERATIONS: dict[type[Message], Callable[[Any], Lso]] = {
    LsoPull: lambda order: Pull(count=order.count),
    EvictRequest: lambda order: Evict(request_ids=(order.request_id,)),
    LsoSwapOut: lambda order: SwapOut(request_id=order.request_id, rest_s=order.rest_s),
    LsoSwapIn: lambda order: SwapIn(request_id=order.request_id),
    LsoCheckpoint: lambda order: Checkpoint(request_id=order.request_id),
    LsoClear: lambda _order: ClearCaches(),
    LsoWarm: lambda order: Warm(model=order.model),
    LsoPreempt: lambda _order: Preempt(),
    LsoSet: lambda order: SetScheduling(
        token_budget=order.token_budget, max_running=order.max_running
    ),
}
"""
Order -> function that returns its operation. Activating a model needs several operations, so its
order is absent.
"""


def check(instance: InstanceState, model: ModelName) -> None:
    """
    Check that this instance serves the model.

    Raises:
        LsoRefusedError: The instance does not serve the model; the message lists those it serves.
    """
    if model not in instance.models:
        known = ", ".join(sorted(instance.models))
        raise LsoRefusedError(
            f"this instance does not serve the model {model!r}; it serves: {known}"
        )


def require(instance: InstanceState, capability: Capability, what: str) -> None:
    """
    Check that the engine has the capability that the operation *what* needs.

    Raises:
        LsoRefusedError: The engine does not have the capability.
    """
    settings = instance.settings
    if capability not in settings.capabilities:
        raise LsoRefusedError(
            f"the engine {settings.engine} on {settings.device} cannot {what}: it lacks the "
            f"capability {capability.value}"
        )


def _state_of(instance: InstanceState, model: ModelName) -> ModelState:
    cold = ModelState(model=model, residency=Residency.COLD)
    return next((entry for entry in instance.engine.models if entry.model == model), cold)


def _nothing_runs(instance: InstanceState, request_ids: tuple[RequestId, ...]) -> LsoResult:
    """
    Result if none of the requests runs or is swapped out.

    Raises:
        LsoRefusedError: A request was never here, or waits in the window.
    """
    for name in request_ids:
        if instance.requests.find(name) is not None:
            raise LsoRefusedError(f"{name} does not run: it waits in the window")
        if name not in instance.departed:
            raise LsoRefusedError(
                f"{name} is unknown to {instance.settings.instance_id}: it runs elsewhere, waits "
                "in a queue, or never existed"
            )
    fates = sorted({instance.departed[name] for name in request_ids})
    return already(f"{_names(request_ids)} left the instance before: {', '.join(fates)}")


def _is_over(held: Held) -> bool:
    return held.phase is Phase.GONE or (held.run is None and held.phase is not Phase.LEAVING)


def _names(request_ids: tuple[RequestId, ...]) -> str:
    return request_ids[0] if len(request_ids) == 1 else f"all {len(request_ids)} requests"


def _limit(value: int) -> str:
    return "the engine's own limit" if value == NO_LIMIT else str(value)
