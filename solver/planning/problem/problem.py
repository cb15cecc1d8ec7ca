"""Input of the plan generator as arrays: request groups, instances, and their costs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]

NONE = -1
"""Index that means no model or no instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupArrays:
    """
    The I request groups (QLM Def. 4.1), served by D kinds of devices. Times are in seconds from
    now.

    The requests of a group finish one after another while the group occupies its instance, so that
    some of them can be in time. The wait of an interactive request ends with its first token, that
    of any other request with its last token.
    """

    model: Ints
    """Index of each group's model, below the number M of models, [I]."""
    num_requests: Floats
    """Number of requests of each group, [I]."""
    weight: Floats
    """Weight of each group: number of requests times their importance weight, 0 or more, [I]."""
    deadline_s: Floats
    """
    Deadline of each group's oldest request, [I]; negative if it has passed, infinite for best
    effort.
    """
    spread_s: Floats
    """
    Time from the deadline of each group's oldest request to that of its newest request, 0 or more,
    [I].
    """
    slo_s: Floats
    """Unit of each group's tardiness, above 0, [I]; infinite for best effort."""
    relegated_share: Floats
    """Share of each group's requests that were relegated: they are late in any plan, [I]."""
    work_s: Floats
    """Mean time for which each group occupies an instance (tokens over throughput), [D, I]."""
    work_var: Floats
    """Variance of `work_s` in square seconds, without the error of the throughput, [D, I]."""
    tail_s: Floats
    """
    Mean time from the start of a request's service to the end of its wait, which delays no other
    group, [D, I].
    """
    tail_var: Floats
    """Variance of `tail_s` in square seconds, [D, I]."""
    drain_s: Floats
    """
    Time for which the last requests of each group still run before another model may be activated,
    [D, I].
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceArrays:
    """The G serving instances, which serve M models. Times are in seconds from now."""

    device: Ints
    """Index of each instance's kind of device, below the number D of kinds, [G]."""
    active: Ints
    """Active model of each instance, or `NONE` without one that it may serve, [G]."""
    activate_s: Floats
    """
    Time to activate each model while another model is active, [G, M]; infinite if not allowed.
    """
    withheld: Bools
    """True for each model that is not allowed now, but will be soon, [G, M]."""
    available_s: Floats
    """Time at which the pulled work of each instance is done, 0 or more, [G]."""
    available_var: Floats
    """Variance of `available_s` in square seconds, [G]."""
    drain_s: Floats
    """Time from `available_s` until the running requests end, [G]; counts before a model swap."""
    rate_error: Floats
    """
    Relative standard deviation of the throughput, which all work of a model has in common, [D, M].
    """
    express_per_s: Floats
    """
    Weight of the interactive requests that arrive per second, need the active model of the
    instance, and would be late while this model is away, 0 or more, [G].
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPlan:
    """The plan that instances follow now, with the indices of `PlanningProblem`."""

    instance: Ints
    """Instance that serves each group, or `NONE` if the group is new, [I]."""
    position: Ints
    """
    Position of each group in the virtual queue of its `instance`, [I]; undefined for new groups.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """
    Weights of the minor cost terms; the main term, the late share of all weight, has weight 1.

    Source: QLM §7 equation 11, made soft, so that an overload also has a plan, and stochastic.
    Differs: the cost is the expected number of late requests instead of a sum of penalties, which
    would reward earliness.
    """

    tardiness: float = 0.02
    """
    Weight of a request's tardiness; tardiness is a multiple of the request's SLO, up to
    `max_tardiness`.
    """
    max_tardiness: float = 5.0
    lost: float = 3.0
    """
    Weight of the time that an instance loses by drains and activations, as a multiple of the weight
    of waiting: it delays the known work and that which will arrive. A swap takes the activation and
    that of the replaced model later, which must come back.
    """
    moved: float = 0.02
    """
    Weight of a late group that moves to another instance, in units of the mean group weight; keeps
    plans stable. A group that is late nowhere moves without cost.
    """
    waiting: float = 3e-3
    """
    Weight of the waiting time of all requests, in units of the mean queue duration. The weight is
    small beside lateness; it makes an instance that is idle take work that waits elsewhere, and
    prevents an endless delay of best-effort requests.
    """
    milestones: tuple[float, ...] = (0.125, 0.375, 0.625, 0.875)
    """Points of a group's progress, 0..1, at which lateness is evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """A snapshot of the cluster, as input of planning."""

    groups: GroupArrays
    instances: InstanceArrays
    running: RunningPlan
    objective: Objective = Objective()

    @property
    def num_groups(self) -> int:
        return len(self.groups.model)

    @property
    def num_instances(self) -> int:
        return len(self.instances.device)

    @property
    def num_models(self) -> int:
        return int(self.instances.activate_s.shape[1])

    def may_serve(self, instance: int, group: int) -> bool:
        """True if *instance* may have the model of *group*."""
        model = self.groups.model[group]
        return bool(np.isfinite(self.instances.activate_s[instance, model]))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOrder:
    """
    A plan: all virtual queues, one after another in one array (QLM Def. 4.2).

    Groups that no instance may serve are in no queue.
    """

    groups: Ints
    """Indices of the groups of all queues, [I or less]."""
    starts: Ints
    """
    Index into `groups` at which each queue begins, and finally the length of `groups`, [G + 1].
    """

    def queue(self, instance: int) -> Ints:
        """Groups in the virtual queue of *instance*, the head first."""
        return self.groups[self.starts[instance] : self.starts[instance + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Cost terms of a plan, weighted as in `Objective`; `total` is minimised."""

    late_share: float
    """
    Expected weighted share of late requests, 0..1, which is 1 - attainment. A group with a deadline
    that no instance may serve is late, and so are relegated requests.
    """
    tardiness: float
    drain: float
    """Cost of swaps: their time, and interactive requests that arrive while a model is away."""
    moved: float
    unserved: float = 0.0
    """
    Share of the weight of groups that no instance may serve; equal for every plan, so not in
    `total`.
    """
    waiting: float = 0.0

    @property
    def total(self) -> float:
        return self.late_share + self.tardiness + self.drain + self.moved + self.waiting
