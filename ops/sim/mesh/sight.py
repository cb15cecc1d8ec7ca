"""Views of an instance: inputs of selecting LSOs, and of the leader's planning."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ops.sim.mesh.change import ModelChange
from ops.sim.mesh.conduct import Conduct
from ops.sim.mesh.engine import BatchEngine
from ops.sim.mesh.kinds import Fleet, Served
from ops.sim.mesh.lanes import AnswerLengths
from ops.sim.mesh.request import MeshRequest
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.estimates import LatencyCoefficients
from solver.planning.lso.actions import drain_plan
from solver.planning.lso.evict_or_swap import KvCosts
from solver.planning.lso.situation import Demand, RunningWork, Situation, SwappedWork
from solver.planning.problem.grouping import Spread
from solver.planning.problem.snapshot import InstanceView, ServiceRates
from solver.planning.residency import withheld_models

if TYPE_CHECKING:
    from ops.sim.mesh.instance import MeshInstance

_CHUNK_TOKENS = 512
_RESIDUAL = 0.25
"""Least expected number of remaining answer tokens, as a share of the mean answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Data for selecting LSOs that are not part of the instance's state."""

    fleet: Fleet
    conduct: Conduct
    answers: AnswerLengths


def situation_of(instance: "MeshInstance", sight: Sight, now: UnixTime) -> Situation:
    """Situation of the instance at the time *now*."""
    engine, conduct = instance.engine, sight.conduct
    waiting = [] if engine is None else [run for run in engine.waiting() if not run.relegated]
    kept_bytes = sum(run.kept_tokens for run in instance.swapped) * _kv_bytes(instance, sight)
    return Situation(
        active=instance.active,
        costs=_costs(instance, sight),
        running=()
        if engine is None
        else tuple(_work(engine, run, sight, now) for run in engine.running()),
        swapped=tuple(
            SwappedWork(request_id=run.request_id, needed_tokens=run.kept_tokens)
            for run in instance.swapped
        ),
        demand=Demand(tokens=sum(r.num_prefill_tokens for r in waiting), slots=len(waiting)),
        free_tokens=0 if engine is None else engine.free_tokens,
        free_slots=0 if engine is None else engine.free_slots,
        host_kv_free_bytes=max(0, conduct.host_kv_bytes - kept_bytes),
        warm_set=instance.weights.warm_set(instance.active),
        drain_limit_s=conduct.drain_limit_s,
        return_s=conduct.drain_limit_s + instance.weights.return_s(instance.active),
    )


def is_infeasible(
    instance: "MeshInstance", sight: Sight, request: MeshRequest, now: UnixTime
) -> bool:
    """True if the request would miss its SLO even if it began now and ran alone."""
    if not sight.conduct.relegates or request.relegated or instance.engine is None:
        return False
    left = 1.0
    if not request.interactive:
        left = max(left, sight.answers.of(request).mean - request.num_output_tokens)
    return now + left * instance.engine.pace_s > request.deadline_at


def view_of(
    instance: "MeshInstance",
    sight: Sight,
    rates: ServiceRates | None,
    waiting: Mapping[ModelName, bool],
    now: UnixTime,
) -> InstanceView:
    """
    The leader's view of an instance.

    Args:
        rates: Service rates of the active model.
        waiting: Model for which work waits -> whether some of it has a deadline.
    """
    change, weights = instance.change, instance.weights
    active = instance.active if change is None else change.model
    others_s = {m: weights.activate_s(m, now) for m in weights.models if m != active}
    back_s = sum(others_s.values()) / len(others_s) if others_s else 0.0
    drain_s = _drain_s(situation_of(instance, sight, now))
    return InstanceView(
        instance_id=instance.instance_id,
        device=instance.device.name,
        active=active,
        activate_s={
            model: back_s if model == active else weights.activate_s(model, now)
            for model in weights.models
        },
        withheld=withheld_models(
            active, others_s, waiting, active_for_s=now - instance.active_since
        ),
        backlog_s=Spread(
            _window_s(instance, sight, rates)
            if change is None
            else _change_s(instance, change, drain_s, now)
        ),
        drain_s=drain_s if change is None else 0.0,
    )


def _window_s(instance: "MeshInstance", sight: Sight, rates: ServiceRates | None) -> Seconds:
    """
    Time to serve the pulled requests that have not begun; the next group can begin after this time.
    """
    if instance.engine is None or rates is None:
        return 0.0
    waiting = instance.engine.waiting()
    tokens = sum(run.num_prefill_tokens + sight.answers.of(run).mean for run in waiting)
    return tokens / rates.token_rate_per_s


def _change_s(
    instance: "MeshInstance", change: ModelChange, drain_s: Seconds, now: UnixTime
) -> Seconds:
    """Remaining time of the model swap in progress."""
    if change.ready_at is not None:
        return max(0.0, change.ready_at - now)
    left_s = min(drain_s, max(0.0, change.drain_until - now))
    return left_s + instance.weights.activate_s(change.model, now)


def _drain_s(situation: Situation) -> Seconds:
    """Time to drain the instance, plus the time to recompute requests that the drain evicts."""
    if not situation.running:
        return 0.0
    plan = drain_plan(situation)
    return plan.predicted_s + plan.recompute_s


def _work(engine: BatchEngine, run: MeshRequest, sight: Sight, now: UnixTime) -> RunningWork:
    mean = sight.answers.of(run).mean
    left = max(_RESIDUAL * mean, mean - run.num_output_tokens)
    remaining_s = left * engine.pace_s
    return RunningWork(
        request_id=run.request_id,
        lane=run.lane,
        context_tokens=run.arrival.prompt_tokens + run.num_output_tokens,
        held_tokens=run.num_computed_tokens,
        gives_way=run.relegated,
        remaining_s=remaining_s,
        slack_s=math.inf if run.relegated else run.deadline_at - now - remaining_s,
    )


def _costs(instance: "MeshInstance", sight: Sight) -> KvCosts:
    how = None
    if instance.active is not None:
        how = sight.fleet.served(instance.device, instance.active)
    return KvCosts(
        latency=None if how is None else coefficients_of(how),
        bytes_per_token=_kv_bytes(instance, sight),
        transfer_bytes_per_s=instance.device.host_link_bytes_per_s,
        host_checkpoints=sight.conduct.host_kv_bytes > 0,
    )


def _kv_bytes(instance: "MeshInstance", sight: Sight) -> int:
    if instance.active is None:
        return 0
    return sight.fleet.models[instance.active].kv_bytes_per_token


def coefficients_of(how: Served) -> LatencyCoefficients:
    """Latency coefficients that are exact for one token and for a chunk of `_CHUNK_TOKENS`."""
    table = how.latency
    one_s, chunk_s = table.tokens_s[1], table.tokens_s[_CHUNK_TOKENS]
    linear_s = (chunk_s - one_s) / (_CHUNK_TOKENS - 1)
    return LatencyCoefficients(
        constant_s=one_s - linear_s,
        linear_s=linear_s,
        attention_s=table.pair_s / 2,
        cross_s=table.pair_s,
        context_s=table.context_s,
    )
