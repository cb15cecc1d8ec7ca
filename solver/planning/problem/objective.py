"""Reference cost of a plan: expected late work along every virtual queue (QLM §7)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solver.planning.problem.problem import (
    NONE,
    Bools,
    Floats,
    Ints,
    PlanCost,
    PlanningProblem,
    QueueOrder,
)

LATE_NOWHERE = 0.01
"""Expected late share in the plan in force up to which a group counts as late nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Normalisers of the terms of a plan's cost; all are above 0."""

    weight: float
    """Total weight of all request groups."""
    queue_s: float
    """Duration of one virtual queue if all work is spread evenly over the instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of a change of the plan in force."""

    second: float
    """
    Cost of one second of a drain or an activation on one instance: what the instance would serve
    meanwhile waits longer, a multiple of it because more requests will arrive.
    """
    move: Floats
    """
    Cost of moving each group to another instance, [I]. It is 0 for a group that is late nowhere:
    moves are priced so that groups which are late in any case do not move with each plan.
    """
    idle: Bools
    """
    Instances that run nothing and have no work in the plan in force, [G]: the next activation there
    delays its own work, and one later request of the model that leaves.
    """


def plan_cost(problem: PlanningProblem, order: QueueOrder) -> PlanCost:
    """
    Expected cost of *order*.

    Mean and variance of the time of a group's turn are propagated along each queue. A model swap
    takes the drain of the running requests and the activation. The error of the throughput is
    common to all work of a model on an instance, so standard deviations add up within a model and
    variances add up across models. The tardiness of a group is that of its last request.

    Raises:
        ValueError: A group that some instance may serve is not in *order* exactly once, or is on an
            instance that may not serve it.

    Source: QLM §7, equations 6-13.
    Differs: along a queue only occupancy adds up, not the completion tails. A swap delays the group
    that causes it. Lateness is soft. Times are normal instead of sampled.
    """
    _check(problem, order)
    scales = scales_of(problem)
    prices = prices_of(problem)
    walks = [_walk(problem, g, order.queue(g)) for g in range(problem.num_instances)]
    objective = problem.objective
    share = problem.groups.weight / scales.weight
    late = late_in_any_plan(problem)
    tardy = np.zeros(problem.num_groups)
    waits = np.zeros(problem.num_groups)
    for walk in walks:
        in_queue, tardy[walk.queue], waits[walk.queue] = _terms(problem, walk, scales)
        late[walk.queue] = np.maximum(late[walk.queue], in_queue)
    home = homes(problem)
    instance = instance_of(problem, order)
    moved = (home != NONE) & (instance != home)
    return PlanCost(
        late_share=float(share @ late),
        tardiness=objective.tardiness * float(share @ tardy),
        drain=sum(_swaps_cost(problem, g, order.queue(g), prices) for g in range(len(walks))),
        moved=float(prices.move[moved].sum()),
        unserved=float(share[never_servable(problem)].sum()),
        waiting=objective.waiting * float(share @ waits),
    )


def queue_cost(problem: PlanningProblem, instance: int, queue: Ints, prices: Prices) -> float:
    """
    Cost of *queue* on *instance*: the queue's part of the plan's cost, without the cost of moves.
    """
    scales, objective = scales_of(problem), problem.objective
    walk = _walk(problem, instance, queue)
    late, tardy, waits = _terms(problem, walk, scales)
    share = problem.groups.weight[queue] / scales.weight
    terms = late + objective.tardiness * tardy + objective.waiting * waits
    return float(share @ terms) + _swaps_cost(problem, instance, queue, prices)


def _swaps_cost(problem: PlanningProblem, instance: int, queue: Ints, prices: Prices) -> float:
    before = np.concatenate(([NONE], queue))[:-1]
    return float(swap_costs(problem, instance, before, queue, prices).sum())


def late_probability(problem: PlanningProblem, order: QueueOrder) -> Floats:
    """
    Probability that some request of a group is late.

    The probability is that of the group's latest point: the largest over start, milestones and end.

    Returns:
        float64[I], 1 for a group with a deadline that no instance may serve.

    Source: QLM equation 12, P(p <= 0).
    Differs: a group's requests are assumed to be late together, so the result is slightly too low.
    """
    _check(problem, order)
    late = _late_unserved(problem)
    for g in range(problem.num_instances):
        walk = _walk(problem, g, order.queue(g))
        late[walk.queue] = _late(walk, (0.0, *problem.objective.milestones, 1.0)).max(axis=1)
    return late


def turns_s(problem: PlanningProblem, order: QueueOrder) -> Floats:
    """Mean seconds until each group is served, float64[I]; infinite for a group in no queue."""
    turns = np.full(problem.num_groups, np.inf)
    for g in range(problem.num_instances):
        walk = _walk(problem, g, order.queue(g))
        turns[walk.queue] = walk.start_s
    return turns


def turns_var(problem: PlanningProblem, order: QueueOrder, *, done: float = 0.0) -> Floats:
    """Variance of the time at which the share *done* of each group has been served, float64[I]."""
    found = np.full(problem.num_groups, np.inf)
    for g in range(problem.num_instances):
        walk = _walk(problem, g, order.queue(g))
        found[walk.queue] = _turn_var(walk, done)
    return found


def alarms(problem: PlanningProblem, order: QueueOrder, *, confidence: float) -> Ints:
    """
    Groups that break QLM's chance constraint under *order*, the likeliest to be late first.

    A group breaks the constraint if its probability of being in time is below *confidence* (Delta).

    Source: QLM equation 12.
    Differs: the result is an alarm instead of a constraint, because an overload also needs a plan.
    """
    late = late_probability(problem, order)
    ranked = np.argsort(-late, kind="stable")
    return ranked[late[ranked] > 1 - confidence].astype(np.int32)


def servable(problem: PlanningProblem) -> Bools:
    """True for each group that some instance may serve, bool[I]."""
    by_model = np.asarray(np.isfinite(problem.instances.activate_s).any(axis=0))
    return np.asarray(by_model[problem.groups.model], dtype=np.bool_)


def late_in_any_plan(problem: PlanningProblem) -> Floats:
    """Share of each group's requests that are late whatever the plan; float64[I]."""
    return np.maximum(problem.groups.relegated_share, _late_unserved(problem))


def _late_unserved(problem: PlanningProblem) -> Floats:
    """1 for each group that has a deadline and that no instance will serve, else 0; float64[I]."""
    late = never_servable(problem) & np.isfinite(problem.groups.deadline_s)
    return np.asarray(late, dtype=np.float64)


def never_servable(problem: PlanningProblem) -> Bools:
    """True for each group that no instance may serve, also not soon, bool[I]."""
    soon = np.asarray(problem.instances.withheld.any(axis=0))[problem.groups.model]
    return np.asarray(~(servable(problem) | soon), dtype=np.bool_)


def homes(problem: PlanningProblem) -> Ints:
    """
    Instance whose current queue has each group, or `NONE`; int32[I].

    The instance is `NONE` for a new group, and for a group whose instance is gone or may not serve
    it any more. Moving a group without an instance costs nothing.
    """
    running = problem.running.instance
    present = (running >= 0) & (running < problem.num_instances)
    at = np.where(present, running, 0)
    may = np.isfinite(problem.instances.activate_s[at, problem.groups.model])
    return np.where(present & may, running, NONE).astype(np.int32)


def running_order(problem: PlanningProblem) -> QueueOrder:
    """Part of the plan in force that is still valid for the current groups and instances."""
    home = homes(problem)
    placed = np.flatnonzero(home != NONE)
    ranked = placed[np.lexsort((problem.running.position[placed], home[placed]))]
    lengths = np.bincount(home[ranked], minlength=problem.num_instances)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    return QueueOrder(groups=ranked.astype(np.int32), starts=starts.astype(np.int32))


def prices_of(problem: PlanningProblem) -> Prices:
    """Prices of a change of the plan in force."""
    objective, scales, late = problem.objective, scales_of(problem), _late_in_force(problem)
    lost = objective.lost * objective.waiting / scales.queue_s
    price = objective.moved / max(1, problem.num_groups)
    return Prices(
        second=lost / problem.num_instances,
        move=np.where(late > LATE_NOWHERE, price, 0.0),
        idle=_idle(problem),
    )


def _idle(problem: PlanningProblem) -> Bools:
    instances, queued = problem.instances, np.diff(running_order(problem).starts)
    return np.asarray((instances.drain_s == 0) & (instances.available_s == 0) & (queued == 0))


def _late_in_force(problem: PlanningProblem) -> Floats:
    """Expected late share of each group in the plan in force, 0 for groups in no queue of it."""
    running, milestones = running_order(problem), problem.objective.milestones
    late = np.zeros(problem.num_groups)
    for g in range(problem.num_instances):
        walk = _walk(problem, g, running.queue(g))
        late[walk.queue] = _late(walk, milestones).mean(axis=1)
    return late


def instance_of(problem: PlanningProblem, order: QueueOrder) -> Ints:
    """Instance that serves each group under *order*, or `NONE`; int32[I]."""
    instance = np.full(problem.num_groups, NONE, dtype=np.int32)
    instance[order.groups] = np.repeat(
        np.arange(problem.num_instances, dtype=np.int32), np.diff(order.starts)
    )
    return instance


def scales_of(problem: PlanningProblem) -> Scales:
    """Normalisers of the terms of a plan's cost, from the planning problem."""
    groups, instances = problem.groups, problem.instances
    may = np.isfinite(instances.activate_s)
    servers = np.zeros((len(groups.work_s), problem.num_models))
    np.add.at(servers, instances.device, may)
    servers_of = servers[:, groups.model]
    pairs = servers_of.sum()
    work_s = float(groups.work_s[servers_of > 0] @ servers_of[servers_of > 0]) / max(1.0, pairs)
    weight = float(groups.weight.sum())
    served = int(servable(problem).sum())
    return Scales(
        weight=weight if weight > 0 else 1.0,
        queue_s=(work_s if work_s > 0 else 1.0) * max(1, served) / problem.num_instances,
    )


def activation_costs(problem: PlanningProblem, instance: int, prices: Prices) -> Floats:
    """
    Cost of activating a model (second axis) on *instance* while another one is active (first axis),
    without the drain; float64[M + 1, M]. The last row, `NONE`, is for no active model.

    The cost is that of the time there and back, and that of the express requests which are expected
    to arrive while their model is away. On an idle instance only the way back costs something, for
    one request of weight 1.
    """
    instances, num_models, scales = problem.instances, problem.num_models, scales_of(problem)
    activate_s = instances.activate_s[instance]
    back_s = np.append(np.where(np.isfinite(activate_s), activate_s, 0.0), 0.0)
    away_s = back_s[:, np.newaxis] + activate_s
    costs = prices.second * away_s
    active, express_per_s = instances.active[instance], instances.express_per_s[instance]
    if prices.idle[instance]:
        costs[active] = problem.objective.waiting * back_s[active] / scales.queue_s / scales.weight
    if active != NONE and express_per_s > 0:
        costs[active] += express_per_s / scales.weight * away_s[active]
    costs[range(num_models), range(num_models)] = 0.0
    return np.asarray(costs, dtype=np.float64)


def swap_costs(
    problem: PlanningProblem, instance: int, before: Ints, after: Ints, prices: Prices
) -> Floats:
    """
    Cost of the drain and the activation on *instance* between groups.

    Args:
        before: Indices of groups; `NONE` for the work that runs now.
        after: Indices of the groups that follow, of a shape that fits that of *before*.
    """
    groups, instances = problem.groups, problem.instances
    model = np.append(groups.model, instances.active[instance])
    drain_s = np.append(groups.drain_s[instances.device[instance]], instances.drain_s[instance])
    activation = activation_costs(problem, instance, prices)[model[before], model[after]]
    swap = prices.second * drain_s[before] + activation
    return np.where(model[before] == model[after], 0.0, swap)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """Times along one virtual queue of n groups, the head first, in seconds from now."""

    queue: Ints
    """Indices of the groups in the queue, the head first, [n]."""
    setup_s: Floats
    """Duration of the drain and the activation before each group is served, [n]."""
    start_s: Floats
    """Mean time at which serving each group begins, after the drain and the activation, [n]."""
    start_var: Floats
    """Variance of `start_s`, without the error that all work of a model has in common, [n]."""
    done_s: Floats
    """Mean work of each model before each group is served, [n, M]."""
    work_s: Floats
    work_var: Floats
    tail_s: Floats
    tail_var: Floats
    deadline_s: Floats
    spread_s: Floats
    own: Ints
    """Model of each group in the queue, [n]."""
    rate_error: Floats
    """Relative standard deviation of the throughput of each model, [M]."""

    @property
    def end_s(self) -> Floats:
        return self.start_s + self.work_s


def _walk(problem: PlanningProblem, instance: int, queue: Ints) -> _Walk:
    groups, instances = problem.groups, problem.instances
    device = instances.device[instance]
    own = groups.model[queue]
    work_s = groups.work_s[device, queue]
    work_var = groups.work_var[device, queue]
    before = np.concatenate(([instances.active[instance]], own))[:-1]
    drain_s = np.concatenate(([instances.drain_s[instance]], groups.drain_s[device, queue]))[:-1]
    setup_s = np.where(own != before, drain_s + instances.activate_s[instance, own], 0.0)
    of_model = own[:, np.newaxis] == np.arange(problem.num_models)
    return _Walk(
        queue=queue,
        setup_s=setup_s,
        start_s=instances.available_s[instance] + np.cumsum(setup_s) + _sum_before(work_s),
        start_var=instances.available_var[instance] + _sum_before(work_var),
        done_s=_sum_before(of_model * work_s[:, np.newaxis]),
        work_s=work_s,
        work_var=work_var,
        tail_s=groups.tail_s[device, queue],
        tail_var=groups.tail_var[device, queue],
        deadline_s=groups.deadline_s[queue],
        spread_s=groups.spread_s[queue],
        own=own,
        rate_error=instances.rate_error[device],
    )


def _terms(problem: PlanningProblem, walk: _Walk, scales: Scales) -> tuple[Floats, Floats, Floats]:
    """Late share, tardiness and waiting of the groups before weighting, each float64[n]."""
    objective = problem.objective
    over_s = np.maximum(0.0, walk.end_s + walk.tail_s - walk.deadline_s - walk.spread_s)
    return (
        np.asarray(_late(walk, objective.milestones).mean(axis=1), dtype=np.float64),
        np.minimum(over_s / problem.groups.slo_s[walk.queue], objective.max_tardiness),
        walk.end_s / scales.queue_s,
    )


def _late(walk: _Walk, progress: Sequence[float]) -> Floats:
    """
    Probability that the request at each of K points of a group's progress is late, float64[n, K].
    """
    late = np.empty((len(walk.queue), len(progress)))
    for k, done in enumerate(progress):
        margin_s = walk.deadline_s + done * walk.spread_s - walk.tail_s
        over_s = walk.start_s + done * walk.work_s - margin_s
        late[:, k] = _normal_cdf(over_s, np.sqrt(_turn_var(walk, done) + walk.tail_var))
    return late


def _turn_var(walk: _Walk, done: float) -> Floats:
    """
    Variance of the time at which a share of each group has been served, float64[n].

    The errors of a model's throughput add up along the queue.
    """
    before = walk.done_s * walk.rate_error
    before_own = before[np.arange(len(walk.queue)), walk.own]
    others_var = (before**2).sum(axis=1) - before_own**2
    own_sd = before_own + done * walk.work_s * walk.rate_error[walk.own]
    var = walk.start_var + done * walk.work_var + others_var + own_sd**2
    return np.asarray(np.maximum(0.0, var), dtype=np.float64)


def _normal_cdf(value: Floats, sd: Floats) -> Floats:
    """
    Probability that a normal variable with mean 0 and deviation *sd* is below *value*.

    If *sd* is 0, the probability is 1 for a *value* above 0, else 0.
    """
    certain = sd == 0
    scaled = np.where(certain, 0.0, value) / np.where(certain, 1.0, sd)
    probability = [0.5 * math.erfc(-z / math.sqrt(2)) for z in scaled]
    return np.where(certain, value > 0, np.asarray(probability, dtype=np.float64))


def _sum_before(values: Floats) -> Floats:
    """Sum of all values before each value, along the first axis."""
    return np.asarray(np.cumsum(values, axis=0) - values, dtype=np.float64)


def _check(problem: PlanningProblem, order: QueueOrder) -> None:
    count = np.bincount(order.groups, minlength=problem.num_groups)
    if not np.array_equal(count, servable(problem)):
        raise ValueError("a plan must contain exactly once each group that some instance may serve")
    instance = instance_of(problem, order)[order.groups]
    model = problem.groups.model[order.groups]
    if not np.isfinite(problem.instances.activate_s[instance, model]).all():
        raise ValueError("the plan assigns a group to an instance that may not serve the group")
