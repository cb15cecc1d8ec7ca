"""Planning problems for tests: explicit, and randomly drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solver.planning.problem.problem import (
    NONE,
    GroupArrays,
    InstanceArrays,
    Ints,
    Objective,
    PlanningProblem,
    QueueOrder,
    RunningPlan,
)

NEVER = np.inf
USUAL = Objective()


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group with equal times on every device and an SLO of 10 s."""

    model: int = 0
    num_requests: float = 1.0
    weight: float = 1.0
    deadline_s: float = NEVER
    spread_s: float = 0.0
    slo_s: float = 10.0
    relegated_share: float = 0.0
    work_s: float = 10.0
    work_var: float = 0.0
    tail_s: float = 0.0
    tail_var: float = 0.0
    drain_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Instance:
    activate_s: tuple[float, ...] = (5.0, 5.0)
    active: int = NONE
    available_s: float = 0.0
    available_var: float = 0.0
    drain_s: float = 0.0
    express_per_s: float = 0.0


def a_problem(
    groups: Sequence[Group],
    instances: Sequence[Instance] = (Instance(),),
    *,
    rate_error: float = 0.0,
    running: Sequence[tuple[int, int]] | None = None,
    objective: Objective = USUAL,
) -> PlanningProblem:
    """A problem with one type of device; *running* is each group's instance and position."""
    num_models = len(instances[0].activate_s)
    places = np.array(running or [(NONE, NONE)] * len(groups), dtype=np.int32).reshape(-1, 2)

    def of_groups(name: str) -> np.ndarray:
        return np.array([getattr(group, name) for group in groups], dtype=np.float64)

    def of_devices(name: str) -> np.ndarray:
        return of_groups(name)[np.newaxis]

    def of_instances(name: str) -> np.ndarray:
        return np.array([getattr(instance, name) for instance in instances], dtype=np.float64)

    return PlanningProblem(
        groups=GroupArrays(
            model=np.array([group.model for group in groups], dtype=np.int32),
            num_requests=of_groups("num_requests"),
            weight=of_groups("weight"),
            deadline_s=of_groups("deadline_s"),
            spread_s=of_groups("spread_s"),
            slo_s=of_groups("slo_s"),
            relegated_share=of_groups("relegated_share"),
            work_s=of_devices("work_s"),
            work_var=of_devices("work_var"),
            tail_s=of_devices("tail_s"),
            tail_var=of_devices("tail_var"),
            drain_s=of_devices("drain_s"),
        ),
        instances=InstanceArrays(
            device=np.zeros(len(instances), dtype=np.int32),
            active=np.array([instance.active for instance in instances], dtype=np.int32),
            activate_s=of_instances("activate_s"),
            withheld=np.zeros((len(instances), num_models), dtype=np.bool_),
            available_s=of_instances("available_s"),
            available_var=of_instances("available_var"),
            drain_s=of_instances("drain_s"),
            rate_error=np.full((1, num_models), rate_error),
            express_per_s=of_instances("express_per_s"),
        ),
        running=RunningPlan(instance=places[:, 0], position=places[:, 1]),
        objective=objective,
    )


def an_order(*queues: Sequence[int]) -> QueueOrder:
    """One queue per instance, head first."""
    lengths = [len(queue) for queue in queues]
    return QueueOrder(
        groups=np.array([group for queue in queues for group in queue], dtype=np.int32),
        starts=np.cumsum([0, *lengths]).astype(np.int32),
    )


def a_random_problem(
    seed: int, *, num_groups: int, num_instances: int, num_models: int
) -> PlanningProblem:
    """
    Random problems with every feature.

    There are two types of devices, models that some or all instances cannot serve, best effort,
    deadlines in the past, and deterministic times. The running plan has new groups and lost
    instances.
    """
    random = np.random.default_rng(seed)
    shape = (2, num_groups)
    device = random.integers(0, 2, num_instances).astype(np.int32)
    active = random.integers(NONE, num_models, num_instances).astype(np.int32)
    work_s = random.lognormal(1.5, 0.8, num_groups) * np.array([[1.0], [2.5]])
    certain = random.random(num_groups) < 0.2
    activate_s = random.uniform(0, 20, (num_instances, num_models))
    activate_s[random.random(activate_s.shape) < 0.25] = np.inf
    queue_s = work_s.mean() * num_groups / num_instances
    best_effort = random.random(num_groups) < 0.2
    deadline_s = random.uniform(-0.2, 1.2, num_groups) * queue_s
    slo_s = random.uniform(0.1, 1.0, num_groups) * queue_s + 1
    running = np.where(
        random.random(num_groups) < 0.7, random.integers(0, num_instances + 1, num_groups), NONE
    )
    return PlanningProblem(
        groups=GroupArrays(
            model=random.integers(0, num_models, num_groups).astype(np.int32),
            num_requests=np.ceil(random.uniform(0, 100, num_groups)),
            weight=random.choice([0.0, 1.0, 4.0], num_groups) * random.uniform(1, 100, num_groups),
            deadline_s=np.where(best_effort, np.inf, deadline_s),
            spread_s=random.uniform(0, 10, num_groups),
            slo_s=np.where(best_effort, np.inf, slo_s),
            relegated_share=np.where(best_effort, random.choice([0.0, 0.5], num_groups), 0.0),
            work_s=work_s,
            work_var=np.where(certain, 0.0, (work_s * random.uniform(0, 0.5, num_groups)) ** 2),
            tail_s=random.uniform(0, 5, shape),
            tail_var=np.where(certain, 0.0, random.uniform(0, 4, shape)),
            drain_s=random.uniform(0, 8, shape),
        ),
        instances=InstanceArrays(
            device=device,
            active=active,
            activate_s=activate_s,
            withheld=np.zeros(activate_s.shape, dtype=np.bool_),
            available_s=np.maximum(0.0, random.uniform(-5, 10, num_instances)),
            available_var=np.maximum(0.0, random.uniform(-4, 4, num_instances)),
            drain_s=random.uniform(0, 8, num_instances),
            rate_error=random.choice([0.0, 0.05, 0.3], (2, num_models)),
            express_per_s=random.choice([0.0, 5.0], num_instances),
        ),
        running=RunningPlan(
            instance=running.astype(np.int32),
            position=random.permutation(num_groups).astype(np.int32),
        ),
    )


def a_random_order(problem: PlanningProblem, seed: int) -> QueueOrder:
    """A random plan that assigns every servable group to an instance that may serve it."""
    random = np.random.default_rng(seed)
    queues: list[list[int]] = [[] for _ in range(problem.num_instances)]
    for group in random.permutation(problem.num_groups):
        able = [g for g in range(problem.num_instances) if problem.may_serve(g, int(group))]
        if able:
            queues[random.choice(able)].append(int(group))
    return an_order(*queues)


def queues_of(order: QueueOrder) -> list[list[int]]:
    return [[int(i) for i in order.queue(g)] for g in range(len(order.starts) - 1)]


def running_as(order: QueueOrder, num_groups: int) -> RunningPlan:
    """The plan *order* in the form of a running plan."""
    instance: Ints = np.full(num_groups, NONE, dtype=np.int32)
    position: Ints = np.full(num_groups, NONE, dtype=np.int32)
    for g, queue in enumerate(queues_of(order)):
        for place, group in enumerate(queue):
            instance[group], position[group] = g, place
    return RunningPlan(instance=instance, position=position)
