"""
Difficult planning problems: slow devices, models that fit few devices, slow swaps, short deadlines.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from solver.planning.problem.problem import (
    NONE,
    Floats,
    GroupArrays,
    InstanceArrays,
    Ints,
    PlanningProblem,
    QueueOrder,
    RunningPlan,
)

INTERACTIVE_WEIGHT = 4.0
"""Weight of a request with a first-token SLO; a batch request has weight 1."""
A100, A10 = 0, 1
"""Indices of the kinds of devices."""
SLOWER = np.array([1.0, 3.0])
"""
Factor of work time on each kind of device (QLM §8.3: an A10 has about a third of the throughput).
"""
_URGENT_GROUP_S = 3.2
"""Mean time of an interactive group on an A100; limits the number of such groups."""
_URGENT_LEFT_S = 15.0
"""Mean slack of interactive groups; limits the number of such groups."""
_REESTIMATE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """Properties of a kind of model that determine its times."""

    weights_gb: float
    tokens_per_s: float
    """Throughput of the model on an A100 with continuous batching."""
    batch_size: int
    fits_small: bool
    """True if the model fits an A10, which has 24 GB."""

    @property
    def warm_s(self) -> float:
        """Time to activate the model from host memory."""
        return 1.0 + self.weights_gb / 16

    @property
    def cold_s(self) -> float:
        """Time to activate the model from storage."""
        return 3.0 + self.weights_gb / 1.4


_SEVEN_B = ModelKind(weights_gb=14, tokens_per_s=3000, batch_size=128, fits_small=True)
_THIRTEEN_B = ModelKind(weights_gb=26, tokens_per_s=1700, batch_size=64, fits_small=False)
_THIRTY_FOUR_B = ModelKind(weights_gb=68, tokens_per_s=700, batch_size=32, fits_small=False)
_KINDS = (_SEVEN_B, _THIRTEEN_B, _SEVEN_B, _THIRTY_FOUR_B)
"""Kinds of models; model m has the kind m modulo 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Harshness:
    """
    Difficulty of a planning problem; by default even the best plan has some percent of late
    requests.
    """

    load: float = 0.95
    """Ratio of all work to the capacity of the instances until the last deadline, without swaps."""
    urgent_load: float = 1.0
    """
    Maximum ratio of interactive work to the capacity of the instances until the deadlines of this
    work.
    """
    urgent_share: float = 0.5
    """Share of interactive groups, within the limit of `urgent_load`."""
    small_share: float = 0.3
    """Share of A10s among the instances."""
    warm_share: float = 0.4
    """Share of models in each instance's host memory; the active model is always included."""
    length_cv: float = 1.0
    """Coefficient of variation of a request's output tokens."""
    rate_error: float = 0.05
    """Relative standard deviation of the throughput of a model on an instance."""


HARSH = Harshness()


def instance(
    seed: int,
    num_groups: int,
    num_instances: int,
    num_models: int,
    harshness: Harshness = HARSH,
) -> PlanningProblem:
    """
    A planning problem without a plan in force; equal arguments give equal problems.

    On an A100, a batch group takes two to four batches (about 50 s) and an interactive group at
    most SLO/4. More than half of the models are rarely requested (QLM §8, workload W_A).

    Raises:
        ValueError: There are no groups, instances or models.
    """
    if min(num_groups, num_instances, num_models) < 1:
        raise ValueError("a problem needs at least one group, instance and model")
    random = np.random.default_rng((seed, num_groups, num_instances, num_models))
    demand = 1 / np.arange(1, num_models + 1) ** 1.2
    demand /= demand.sum()
    device = np.full(num_instances, A100, dtype=np.int32)
    device[: min(num_instances - 1, round(harshness.small_share * num_instances))] = A10
    random.shuffle(device)
    capacity = float((1 / SLOWER[device]).sum())
    num_urgent = min(
        round(harshness.urgent_share * num_groups),
        round(harshness.urgent_load * capacity * _URGENT_LEFT_S / _URGENT_GROUP_S),
    )
    model = random.choice(num_models, num_groups, p=demand).astype(np.int32)
    urgent = random.permutation(np.arange(num_groups) < num_urgent)
    batch = _batch(random, model[~urgent], capacity, harshness)
    groups = _merged(_interactive(random, model[urgent], harshness), batch, urgent)
    return PlanningProblem(
        groups=groups,
        instances=_instances(random, device, demand, harshness),
        running=RunningPlan(
            instance=np.full(num_groups, NONE, dtype=np.int32),
            position=np.zeros(num_groups, dtype=np.int32),
        ),
    )


def urgent_arrivals(
    problem: PlanningProblem, order: QueueOrder, num_urgent: int, seed: int
) -> PlanningProblem:
    """
    *problem* while *order* runs, after *num_urgent* interactive groups have arrived.

    Known quantities are estimated again, with errors up to 3 %. The new groups have the last
    indices and are in no queue.
    """
    random = np.random.default_rng((seed, num_urgent))
    known = problem.groups
    factor = random.uniform(1 - _REESTIMATE, 1 + _REESTIMATE, problem.num_groups)
    known = replace(known, work_s=known.work_s * factor)
    models = random.choice(known.model, num_urgent).astype(np.int32)
    arrived = _interactive(random, models, HARSH)
    is_new = np.arange(problem.num_groups + num_urgent) >= problem.num_groups
    running = np.full(len(is_new), NONE, dtype=np.int32)
    position = np.zeros(len(is_new), dtype=np.int32)
    for index in range(problem.num_instances):
        queue = order.queue(index)
        running[queue] = index
        position[queue] = np.arange(len(queue))
    return replace(
        problem,
        groups=_merged(arrived, known, is_new),
        running=RunningPlan(instance=running, position=position),
    )


def is_interactive(problem: PlanningProblem) -> NDArray[np.bool_]:
    """True for each group whose requests have a TTFT target, [I]."""
    return problem.groups.weight > problem.groups.num_requests


def _interactive(random: np.random.Generator, model: Ints, harshness: Harshness) -> GroupArrays:
    """Groups of requests with TTFT targets of 10 to 30 s."""
    count = len(model)
    slo_s = random.choice([10.0, 20.0, 30.0], count)
    tokens = random.uniform(80, 250, count)
    tokens_per_s = _of_kind(model, "tokens_per_s")
    want_s = slo_s / 4 * random.uniform(0.3, 1.0, count)
    num_requests = np.maximum(1.0, np.floor(want_s * tokens_per_s / tokens))
    first_token_s = np.outer(SLOWER, 0.2 + 300 / tokens_per_s)
    work_s = np.outer(SLOWER, num_requests * tokens / tokens_per_s)
    return GroupArrays(
        model=model,
        num_requests=num_requests,
        weight=INTERACTIVE_WEIGHT * num_requests,
        deadline_s=slo_s * random.uniform(0.5, 1.0, count),
        spread_s=slo_s * random.uniform(0.0, 0.3, count),
        slo_s=slo_s,
        relegated_share=np.zeros(count),
        work_s=work_s,
        work_var=(harshness.length_cv * work_s) ** 2 / num_requests,
        tail_s=first_token_s,
        tail_var=(0.4 * first_token_s) ** 2,
        drain_s=_drain_s(model, tokens),
    )


def _batch(
    random: np.random.Generator, model: Ints, capacity: float, harshness: Harshness
) -> GroupArrays:
    """
    Batch groups; the last deadline is the time at which the instances could finish the groups at
    the given load.
    """
    count = len(model)
    tokens = random.uniform(150, 450, count)
    tokens_per_s = _of_kind(model, "tokens_per_s")
    num_requests = np.floor(_of_kind(model, "batch_size") * random.uniform(2, 4, count))
    work_s = np.outer(SLOWER, num_requests * tokens / tokens_per_s)
    horizon_s = float(work_s[A100].sum()) / capacity / harshness.load
    deadline_s = 30 + horizon_s * random.uniform(0.1, 1.0, count)
    tail_s = np.outer(np.array([1.0, 1.5]), tokens * _of_kind(model, "batch_size") / tokens_per_s)
    return GroupArrays(
        model=model,
        num_requests=num_requests,
        weight=num_requests.copy(),
        deadline_s=deadline_s,
        spread_s=deadline_s * random.uniform(0.0, 0.2, count),
        slo_s=deadline_s * random.uniform(1.0, 1.8, count),
        relegated_share=np.zeros(count),
        work_s=work_s,
        work_var=(harshness.length_cv * work_s) ** 2 / num_requests,
        tail_s=tail_s,
        tail_var=(harshness.length_cv * tail_s) ** 2,
        drain_s=_drain_s(model, tokens),
    )


def _drain_s(model: Ints, tokens: Floats) -> Floats:
    """
    Drain time of groups: the last requests of a batch decode longer than its other requests, and an
    A10 has smaller batches.
    """
    decode_s = tokens * _of_kind(model, "batch_size") / _of_kind(model, "tokens_per_s")
    return np.outer(np.array([0.8, 1.2]), decode_s)


def _instances(
    random: np.random.Generator, device: Ints, demand: Floats, harshness: Harshness
) -> InstanceArrays:
    count, num_models = len(device), len(demand)
    models = np.arange(num_models)
    fits = (device[:, None] == A100) | (_of_kind(models, "fits_small")[None, :] > 0)
    active = np.empty(count, dtype=np.int32)
    for kind in (A100, A10):
        here = np.flatnonzero(device == kind)
        if len(here):
            likely = np.where(fits[here[0]], demand, 0.0)
            active[here] = _in_proportion(random, likely, len(here))
    warm = random.random((count, num_models)) < harshness.warm_share
    warm[np.arange(count), active] = True
    activate_s = np.where(warm, _of_kind(models, "warm_s"), _of_kind(models, "cold_s"))
    available_s = random.uniform(0.0, 6.0, count)
    error = random.uniform(0.7, 1.3, (len(SLOWER), num_models))
    return InstanceArrays(
        device=device,
        active=active,
        activate_s=np.where(fits, activate_s, np.inf),
        withheld=np.zeros(fits.shape, dtype=np.bool_),
        available_s=available_s,
        available_var=(0.2 * available_s) ** 2,
        drain_s=random.uniform(2.0, 12.0, count),
        rate_error=harshness.rate_error * error,
        express_per_s=np.zeros(count),
    )


def _in_proportion(random: np.random.Generator, likely: Floats, count: int) -> Ints:
    """
    Kinds of *count* models; each kind occurs in proportion to its probability, up to rounding.
    """
    at = (np.arange(count) + random.random()) / count
    models = np.searchsorted(np.cumsum(likely) / likely.sum(), at, side="right")
    return np.minimum(models, len(likely) - 1).astype(np.int32)


def _of_kind(model: NDArray[np.integer], name: str) -> Floats:
    """The attribute *name* of the kind of each model."""
    values: Floats = np.array([float(getattr(kind, name)) for kind in _KINDS])
    kind: Floats = values[model % len(_KINDS)]
    return kind


def _merged(chosen: GroupArrays, other: GroupArrays, is_chosen: NDArray[np.bool_]) -> GroupArrays:
    """Merge two sets of groups; groups of *chosen* get the positions where *is_chosen*."""
    merged = {}
    for field in fields(GroupArrays):
        first, second = getattr(chosen, field.name), getattr(other, field.name)
        array = np.empty((*first.shape[:-1], len(is_chosen)), dtype=first.dtype)
        array[..., is_chosen], array[..., ~is_chosen] = first, second
        merged[field.name] = array
    return GroupArrays(**merged)
