"""Input of the plan generator as arrays: request groups, instances, and their costs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

NONE = -1
"""Index that means no model or no instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupArrays:
    """
    Request groups (QLM Def. 4.1); I of them, served by D kinds of devices. Seconds from now.

    The requests of a group finish one after another while the group occupies its instance, so that
    some of them can be in time. The wait of an interactive request ends with its first token, that
    of any other request with its last token.
    """

    model: Ints
    """[I], index of the group's model, below M."""
    num_requests: Floats
    """[I], number of requests of each group."""
    weight: Floats
    """[I], weight of the whole group: requests times their importance weight; 0 or more."""
    deadline_s: Floats
    """
    [I], deadline of the oldest request; negative when it has passed, infinite for best effort.
    """
    spread_s: Floats
    """[I], time from the oldest request's deadline to the newest request's deadline; 0 or more."""
    slo_s: Floats
    """[I], above 0: unit of tardiness; infinite for best effort."""
    work_s: Floats
    """[D, I], mean time that the group occupies an instance (tokens over throughput)."""
    work_var: Floats
    """[D, I], variance of `work_s`, square seconds, without the throughput's own error."""
    tail_s: Floats
    """[D, I], mean time from a request's turn to the end of its wait; delays no other group."""
    tail_var: Floats
    """[D, I], variance of `tail_s`, square seconds."""
    drain_s: Floats
    """[D, I], time that the last requests still run before another model may be activated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceArrays:
    """Instances; G of them, M models. Seconds from now."""

    device: Ints
    """[G], index of the kind of device of each instance, below D."""
    active: Ints
    """[G], the resident model or `NONE`."""
    activate_s: Floats
    """[G, M], time to activate a model while another model is active; infinite if not allowed."""
    available_s: Floats
    """[G], time at which the pulled work is done; 0 or more."""
    available_var: Floats
    """[G], variance of `available_s`, square seconds."""
    drain_s: Floats
    """[G], time from `available_s` until the running requests end; counts before a model swap."""
    rate_error: Floats
    """[D, M], relative standard deviation of the throughput, common to all work of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPlan:
    """The plan that instances follow now. Indices as in `PlanningProblem`."""

    instance: Ints
    """[I], the instance that has the group, or `NONE` when the group is new."""
    position: Ints
    """[I], position of the group in the virtual queue of `instance`; undefined for new groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """
    Weights of the minor cost terms; the main term, the late share of all weight, has weight 1.

    Source: QLM §7 equation 11, made soft, so that an overload also has a plan, and stochastic.
    Differs: the cost is the expected number of late requests instead of a sum of penalties, which
    would reward earliness.
    """

    tardiness: float = 0.02
    """Weight of a request's tardiness, in multiples of its SLO up to `max_tardiness`."""
    max_tardiness: float = 5.0
    drain: float = 0.01
    """Weight of the time of drains and activations per instance, in mean works of a group."""
    moved: float = 0.02
    """Weight of a group that leaves its instance, in mean group weights; keeps plans stable."""
    waiting: float = 1e-4
    """
    Weight of the waiting time of requests without a deadline, in mean queue durations. The weight
    is small: it breaks ties, and prevents an endless delay of best effort.
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
    """[I or less], group indices."""
    starts: Ints
    """[G + 1], index into `groups` where each queue begins; at the end, the length of `groups`."""

    def queue(self, instance: int) -> Ints:
        """Groups of *instance*, head first."""
        return self.groups[self.starts[instance] : self.starts[instance + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Cost terms of a plan, weighted as in `Objective`; `total` is minimised."""

    late_share: float
    """
    Expected weighted share of late requests, 0..1, which is 1 - attainment. A group with a deadline
    that no instance may serve is late.
    """
    tardiness: float
    drain: float
    moved: float
    unserved: float = 0.0
    """Share of weight that no instance may serve; the same for every plan, and not in `total`."""
    waiting: float = 0.0

    @property
    def total(self) -> float:
        return self.late_share + self.tardiness + self.drain + self.moved + self.waiting
