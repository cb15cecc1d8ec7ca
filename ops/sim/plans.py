"""Outcomes of a plan in random scenarios: an independent judge of plan generators."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solver.planning.problem.problem import (
    NONE,
    Floats,
    GroupArrays,
    InstanceArrays,
    PlanningProblem,
    QueueOrder,
)

Bools = NDArray[np.bool_]

SLICES = 16
"""
Maximum number of parts in which a group is simulated; in a small group, each part is one request.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Results of a plan in each of S random scenarios."""

    late: Floats
    """Share of late requests of each group in each scenario, [S, I], 0..1."""
    weight: Floats
    """Weight of each group, [I]."""
    setup_s: Floats
    """Seconds spent on drains and activations in each scenario, summed over the instances, [S]."""
    swaps: int
    """Number of activations, including the first activation of each instance."""

    def attainment(self, part: Bools | None = None) -> Floats:
        """
        Weighted share of requests in time among the groups in *part*, in each scenario, [S]; 1
        without weight.
        """
        weight = self.weight if part is None else np.where(part, self.weight, 0.0)
        total = float(weight.sum())
        if total == 0:
            return np.ones(len(self.late))
        return np.asarray(1 - self.late @ weight / total, dtype=np.float64)

    def late_share(self) -> Floats:
        """Expected share of late requests of each group, [I]."""
        return np.asarray(self.late.mean(axis=0), dtype=np.float64)

    def late_probability(self) -> Floats:
        """Share of scenarios in which at least one request of each group was late, [I] (eq. 12)."""
        return np.asarray((self.late > 0).mean(axis=0), dtype=np.float64)


def judge(
    problem: PlanningProblem, order: QueueOrder, *, num_scenarios: int = 64, seed: int = 0
) -> Verdict:
    """
    Simulate every virtual queue in sampled scenarios.

    Each part of a group takes a gamma-distributed time. In each scenario, one lognormal factor per
    instance and model scales all times, including tails and drains. Before a model swap, the last
    requests drain; then the new model is activated. Plans that are judged with equal seeds get
    the same random numbers for groups on equal devices.

    Raises:
        ValueError: A group is in two places, or on an instance that may not serve its model.

    Source: QLM §6, completion times as distributions; equations 6-10 for the sums.
    Differs: sampled instead of normal; shares no formula with `solver.planning.problem.objective`.
    """
    _check(problem, order)
    scenarios = _Scenarios(problem, num_scenarios, seed)
    late = np.zeros((num_scenarios, problem.num_groups))
    in_no_queue = np.isin(np.arange(problem.num_groups), order.groups, invert=True)
    late[:, in_no_queue & np.isfinite(problem.groups.deadline_s)] = 1.0
    setup_s = np.zeros(num_scenarios)
    swaps = 0
    for index in range(problem.num_instances):
        server = _Server(problem, index, scenarios)
        for group in order.queue(index).tolist():
            late[:, group] = server.serve(group)
        setup_s += server.setup_s
        swaps += server.swaps
    return Verdict(late=late, weight=problem.groups.weight, setup_s=setup_s, swaps=swaps)


class _Scenarios:
    """Random factors of S scenarios, independent of the plan."""

    def __init__(self, problem: PlanningProblem, count: int, seed: int) -> None:
        self.count = count
        self._seed = seed
        self._groups: GroupArrays = problem.groups
        instances: InstanceArrays = problem.instances
        random = np.random.default_rng((seed, 0))
        self.available_s = _gamma(
            random, instances.available_s, instances.available_var, (count, problem.num_instances)
        )
        error = instances.rate_error[instances.device]
        log_var = np.log1p(error**2)
        normal = random.standard_normal((count, *error.shape))
        self.slower: Floats = np.exp(np.sqrt(log_var) * normal - log_var / 2)
        """
        Ratio of actual time to mean time of each model on each instance, [S, G, M]; 1 on average.
        """

    def work_s(self, group: int, device: int, sizes: Floats) -> Floats:
        """Times of parts with *sizes* requests, [S, K], without the instance's factor."""
        random = np.random.default_rng((self._seed, 1, group))
        share = sizes / sizes.sum()
        mean, var = self._groups.work_s[device, group], self._groups.work_var[device, group]
        return _gamma(random, mean * share, var * share, (self.count, len(sizes)))

    def tail_s(self, group: int, device: int, num_slices: int) -> Floats:
        """
        Time from the start of a request to the token of its SLO, [S, K], without the instance's
        factor.
        """
        random = np.random.default_rng((self._seed, 2, group))
        mean = np.full(num_slices, self._groups.tail_s[device, group])
        var = np.full(num_slices, self._groups.tail_var[device, group])
        return _gamma(random, mean, var, (self.count, num_slices))


class _Server:
    """One instance that serves its queue, in all scenarios in parallel."""

    def __init__(self, problem: PlanningProblem, index: int, scenarios: _Scenarios) -> None:
        self._groups = problem.groups
        self._instances = problem.instances
        self._index = index
        self._device = int(problem.instances.device[index])
        self._scenarios = scenarios
        self._now_s = scenarios.available_s[:, index].copy()
        self._resident = int(problem.instances.active[index])
        self._leaving_s = np.asarray(problem.instances.drain_s[index]) * (
            1.0 if self._resident == NONE else scenarios.slower[:, index, self._resident]
        )
        self.setup_s = np.zeros(scenarios.count)
        self.swaps = 0

    def serve(self, group: int) -> Floats:
        """Serve *group* next; return the group's share of late requests in each scenario, [S]."""
        groups, device = self._groups, self._device
        model = int(groups.model[group])
        self._make_resident(model)
        slower = self._scenarios.slower[:, self._index, model, np.newaxis]
        sizes = _slices(groups.num_requests[group])
        work_s = slower * self._scenarios.work_s(group, device, sizes)
        tail_s = slower * self._scenarios.tail_s(group, device, len(sizes))
        begun_s = self._now_s[:, np.newaxis] + np.cumsum(work_s, axis=1) - work_s
        # The middle request of a slice represents the slice: half of the slice's other requests are
        # served before it.
        done_s = begun_s + work_s * (sizes - 1) / (2 * sizes) + tail_s
        rank = np.cumsum(sizes) - sizes + (sizes - 1) / 2
        progress = rank / max(1.0, sizes.sum() - 1)
        late = done_s > groups.deadline_s[group] + groups.spread_s[group] * progress
        self._now_s = self._now_s + work_s.sum(axis=1)
        self._leaving_s = groups.drain_s[device, group] * slower[:, 0]
        return np.asarray(late @ sizes / sizes.sum(), dtype=np.float64)

    def _make_resident(self, model: int) -> None:
        if model == self._resident:
            return
        setup_s = self._leaving_s + self._instances.activate_s[self._index, model]
        self._now_s = self._now_s + setup_s
        self.setup_s += setup_s
        self.swaps += 1
        self._resident = model


def _slices(num_requests: float) -> Floats:
    """Number of requests in each part of a group, [K]; the parts are nearly equal."""
    count = max(1, round(num_requests))
    return np.diff(np.linspace(0, count, min(count, SLICES) + 1).round())


def _gamma(
    random: np.random.Generator, mean: Floats, var: Floats, shape: tuple[int, ...]
) -> Floats:
    """Gamma-distributed samples with *mean* and *var*; the mean where the variance is 0."""
    certain = (mean <= 0) | (var <= 0)
    form = np.where(certain, 1.0, mean) ** 2 / np.where(certain, 1.0, var)
    drawn = random.gamma(form, np.where(certain, 1.0, mean) / form, shape)
    return np.asarray(np.where(certain, mean, drawn), dtype=np.float64)


def _check(problem: PlanningProblem, order: QueueOrder) -> None:
    if np.bincount(order.groups, minlength=1).max(initial=0) > 1:
        raise ValueError("a group has two positions in the plan")
    instance = np.repeat(np.arange(problem.num_instances), np.diff(order.starts))
    model = problem.groups.model[order.groups]
    if not np.isfinite(problem.instances.activate_s[instance, model]).all():
        raise ValueError("a group is on an instance that may not have its model")
