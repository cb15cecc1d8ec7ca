"""Read-only views of an instance for statuses, metrics and operators."""

import math
from collections.abc import Iterable, Mapping
from statistics import fmean

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.telemetry import Capability, InstanceStatus, PullState, Residency
from solver.instance.load import unimportant_delay_s
from solver.instance.request import Held
from solver.instance.state import InstanceState
from solver.planning.lso.evict_or_swap import KvCosts
from solver.planning.lso.facts import facts_of
from solver.planning.lso.situation import Demand, RunningWork, Situation, SwappedWork, WarmSet
from solver.prediction.latency.service_time import (
    predicted_prefill_s,
    predicted_rest_s,
    tokens_s,
)
from solver.scheduling.engine.entry import Rank
from solver.scheduling.pull_room import has_room
from solver.scheduling.window import tokens_needed


def pull_state(instance: InstanceState) -> PullState:
    """Pulled work, the bounds of pulled work, and whether one more request may be pulled."""
    room, engine = instance.room, instance.engine
    held = room.held(engine, instance.num_pulls)
    return PullState(
        requests=held.num_requests,
        max_requests=room.bounds.window,
        best_effort=held.num_best_effort,
        max_best_effort=room.bounds.best_effort_window,
        backlog_s=held.regular_s,
        whole_backlog_s=room.whole_s(engine, instance.num_pulls),
        max_backlog_s=room.bounds.max_backlog_s,
        tokens=held.regular_tokens + held.best_effort_tokens,
        max_tokens=engine.kv_capacity_tokens,
        room=instance.may_pull and has_room(held, room.bounds_now(engine)),
    )


def status(
    instance: InstanceState,
    now: UnixTime,
    *,
    seq: int,
    kv_utilization: float,
    put: Mapping[str, int],
    released: Iterable[str],
) -> InstanceStatus:
    """
    Present status of the instance.

    Args:
        seq: Number of the status.
        kv_utilization: Used share of the engine's KV, 0..1.
        put: Queue -> number of requests that the instance has returned to it.
        released: Queues that the leader is about to delete; those in use are left out.
    """
    settings, engine, requests = instance.settings, instance.engine, instance.requests
    running_tokens = sum(
        tokens_needed(held.request, generated=generated) - held.request.prompt_tokens - generated
        for held in requests.runs
        for generated in (requests.generated(held),)
    )
    backlog_tokens = requests.window.tokens + running_tokens
    return InstanceStatus(
        instance_id=settings.instance_id,
        incarnation=settings.incarnation,
        seq=seq,
        at=now,
        engine=settings.engine,
        device=settings.device,
        model=instance.model,
        activating=instance.following.activating,
        models=engine.models,
        releasing=tuple(sorted(instance.removed)),
        plan_epoch=plan_epoch(instance),
        running=requests.num_runs,
        waiting=requests.num_waiting,
        max_running=engine.max_running,
        backlog_tokens=backlog_tokens,
        backlog_s=tokens_s(backlog_tokens, instance.profile),
        kv_utilization=kv_utilization,
        kv_capacity_tokens=engine.kv_capacity_tokens,
        draining=instance.draining,
        takes_in=instance.may_pull and engine.alive,
        totals=instance.totals.frozen(),
        pulled_by_lane=dict(instance.totals.by_lane),
        put=dict(put),
        released=tuple(name for name in released if not instance.uses(name)),
        pulled_to=dict(instance.totals.pulled_to),
        capabilities=tuple(sorted(each.value for each in settings.capabilities)),
        swapped_out=len(requests.swapped_out),
        host_kv_bytes=engine.host_kv_bytes,
        host_kv_capacity_bytes=engine.host_kv_capacity_bytes,
        prefill_backlog_tokens=sum(each.request.prompt_tokens for each in requests if each.ahead),
        pull=pull_state(instance),
        lso=facts_of(situation(instance, now)),
    )


def plan_epoch(instance: InstanceState) -> int:
    """Epoch of the last plan; 0 without a plan."""
    plan = instance.following.plan
    return 0 if plan is None else plan.epoch


NO_BOUND = 1 << 60
"""KV capacity in tokens that is assumed for an engine that has not reported it."""


def situation(instance: InstanceState, now: UnixTime, demand: Demand | None = None) -> Situation:
    """
    Present situation of the instance; requests that are about to leave do not count.

    Args:
        demand: Tokens and slots that the request at the head needs; None: the needs of all regular
            requests in the window.
    """
    engine = instance.engine
    pulled = pull_state(instance)
    staying = [
        held for held in instance.requests.runs if held.run is not None and held.run.ending is None
    ]
    reserved = sum(held.run.room_tokens for held in staying if held.run is not None)
    window = instance.requests.window
    return Situation(
        active=instance.model,
        costs=kv_costs(instance),
        running=tuple(_work(instance, held, now) for held in staying),
        swapped=tuple(
            SwappedWork(
                request_id=held.request_id,
                needed_tokens=held.tokens_needed,
                rested=held.request_id in window,
            )
            for held in instance.requests.swapped_out
        ),
        demand=_window_demand(instance) if demand is None else demand,
        # An engine that has not yet reported its KV capacity counts as unbounded.
        free_tokens=(engine.kv_capacity_tokens or NO_BOUND) - reserved,
        free_slots=engine.max_running - len(staying),
        host_kv_free_bytes=host_kv_free_bytes(instance),
        warm_set=_warm_set(instance),
        activate_s={entry.model: entry.activate_s for entry in engine.models},
        drain_limit_s=instance.settings.drain_limit_s,
        return_s=_return_s(instance),
        pull_room=pulled.max_requests - pulled.requests if pulled.room else 0,
        resumes=Capability.RESUME in instance.settings.capabilities,
    )


def kv_costs(instance: InstanceState) -> KvCosts:
    """KV costs of the active model on this instance, measured where possible."""
    profile = instance.profile
    return KvCosts(
        latency=None if profile is None else profile.latency,
        bytes_per_token=kv_bytes(instance, 1),
        transfer_bytes_per_s=instance.engine.restored_bytes_per_s
        or instance.settings.transfer_bytes_per_s,
        host_checkpoints=Capability.CHECKPOINT in instance.settings.capabilities,
    )


def kv_bytes(instance: InstanceState, tokens: int) -> int:
    """KV size in bytes of *tokens* tokens of the active model; 0 if unknown."""
    facts = None if instance.model is None else instance.models.get(instance.model)
    return 0 if facts is None else tokens * facts.kv_bytes_per_token


def host_kv_free_bytes(instance: InstanceState) -> int:
    """Host memory for KV, without the part that is reserved for swapped-out requests."""
    kept = sum(held.lease.context_tokens for held in instance.requests.swapped_out if held.lease)
    return max(0, instance.engine.host_kv_capacity_bytes - kv_bytes(instance, kept))


def _return_s(instance: InstanceState) -> Seconds:
    """
    Predicted time to swap back to the current model: a drain and an activation.

    The active model's own activation time is unknown, so the mean time of the other models is used.
    """
    others_s = [
        entry.activate_s
        for entry in instance.engine.models
        if entry.residency is not Residency.ACTIVE
    ]
    return instance.settings.drain_limit_s + (fmean(others_s) if others_s else 0.0)


def _work(instance: InstanceState, held: Held, now: UnixTime) -> RunningWork:
    generated = instance.requests.generated(held)
    remaining_s = _remaining_s(instance, held, generated)
    return RunningWork(
        request_id=held.request_id,
        lane=held.request.lane,
        context_tokens=held.request.prompt_tokens + generated,
        held_tokens=held.run.room_tokens if held.run is not None else 0,
        gives_way=held.rank is not Rank.REGULAR,
        begins_first=instance.requests.window.would_be_first(
            held.request, held.rank, now, unimportant_delay_s=unimportant_delay_s(instance, now)
        ),
        remaining_s=remaining_s,
        slack_s=_slack_s(held, generated, remaining_s, now),
    )


def _slack_s(held: Held, generated: int, remaining_s: Seconds | None, now: UnixTime) -> Seconds:
    """
    Time for which a run can pause without missing the deadline of its next token or completion.
    """
    if remaining_s is None or held.rank is not Rank.REGULAR:
        return math.inf
    slo, arrived_at = held.request.slo, held.request.arrived_at
    next_due_at = slo.token_deadline_at(arrived_at, generated + 1)
    return min(next_due_at, slo.completion_deadline_at(arrived_at) - remaining_s) - now


def _remaining_s(instance: InstanceState, held: Held, generated: int) -> Seconds | None:
    profile = instance.profile
    if profile is None or profile.latency is None:
        return None
    pace_s = instance.engine.pace_s
    left_s = predicted_rest_s(
        held.request,
        profile,
        output_tokens=generated,
        pace_s=pace_s if math.isfinite(pace_s) else 0.0,
    )
    return left_s + predicted_prefill_s(held.request, profile) if held.ahead else left_s


def _window_demand(instance: InstanceState) -> Demand:
    waiting = [
        held
        for held in instance.requests
        if held.request_id in instance.requests.window and held.rank is Rank.REGULAR
    ]
    return Demand(tokens=sum(held.tokens_needed for held in waiting), slots=len(waiting))


def _warm_set(instance: InstanceState) -> WarmSet:
    engine = instance.engine
    can_warm = Capability.WARM_START in instance.settings.capabilities
    return WarmSet(
        residency={entry.model: entry.residency for entry in engine.models},
        num_bytes={entry.model: entry.warm_bytes for entry in engine.models},
        budget_bytes=engine.warm_capacity_bytes if can_warm else 0,
    )
