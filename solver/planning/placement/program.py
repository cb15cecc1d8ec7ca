"""The program that places models on devices: CP-SAT of OR-Tools."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model

from shared.contracts.base import ModelName
from solver.planning.placement.problem import Fleet, Group, groups_of, misfits

_MIB = 1 << 20
_LIMIT = 1.0
"""Limit of each search, in CP-SAT's deterministic time, so that equal fleets get equal places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlace:
    """One agent: its devices, and the models that it serves."""

    devices: tuple[int, ...]
    """Positions in the fleet."""
    first: ModelName
    """Model with which the agent begins."""
    models: tuple[ModelName, ...]
    """All models that fit its devices."""
    wide_enough: tuple[ModelName, ...]
    """All models that need no more devices, whether or not they fit the memory."""
    warm: tuple[ModelName, ...]
    """Models beside the first that have room in host memory."""
    warm_bytes: int
    """Host memory that the agent needs for them, whichever of its models is active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Agents in the order of their devices; none if there are misfits."""

    agents: tuple[AgentPlace, ...] = ()
    misfits: tuple[str, ...] = ()
    """Why models or agents have no place."""


def place(fleet: Fleet) -> Placement:
    """
    Place the models of *fleet*, each on at least one agent that can serve it.

    As many models as possible begin on an agent; then as many devices as possible are used, models
    have equal numbers of agents, and host memory keeps as many others warm as possible. Equal
    fleets get equal placements.
    """
    groups = groups_of(fleet)
    if found := tuple(misfits(fleet, groups)):
        return Placement(misfits=found)
    program = _Program(fleet, groups)
    if (solver := program.best()) is not None:
        return Placement(agents=tuple(program.places(solver)))
    least, most = _Program(fleet, groups).bounds()
    between = f"exactly {most}" if least == most else f"{least} to {most}"
    reason = (
        f"{fleet.num_agents} agents have no place: with these models, {len(fleet.devices)} devices "
        f"can have {between} (--agents)"
    )
    return Placement(misfits=(reason,))


class _Program:
    """
    Variables and constraints of one fleet.

    `first[m, g]`: the agent of group *g* begins with model *m*; a group with a first model is open.
    `warm[m, g]`: the agent also has model *m* in host memory, or gets it there when it swaps.
    `more[m][k]`: model *m* has more than *k* agents.
    """

    def __init__(self, fleet: Fleet, groups: tuple[Group, ...]) -> None:
        self.fleet, self.groups = fleet, groups
        self.model = model = cp_model.CpModel()
        self.fitting = [
            (m, g)
            for m, need in enumerate(fleet.models)
            for g, group in enumerate(groups)
            if group.fits(need)
        ]
        self.first = {key: model.new_bool_var(f"first {key}") for key in self.fitting}
        self.warm = {key: model.new_bool_var(f"warm {key}") for key in self.fitting}
        self.open = [sum(self.first[m, g] for m in self._models_of(g)) for g in range(len(groups))]
        self.more = [self._counted(m) for m in range(len(fleet.models))]
        self._constrain_devices()
        self._constrain_host()

    def _models_of(self, group: int) -> list[int]:
        return [m for m, g in self.fitting if g == group]

    def _groups_of(self, model: int) -> list[int]:
        return [g for m, g in self.fitting if m == model]

    def _counted(self, m: int) -> list[Any]:
        groups = self._groups_of(m)
        more = [self.model.new_bool_var(f"more {m} {k}") for k in range(len(groups))]
        self.model.add(sum(more) == sum(self.first[m, g] for g in groups))
        for fewer, further in pairwise(more):
            self.model.add(fewer >= further)
        return more

    def _constrain_devices(self) -> None:
        """A device has one agent at most, and each model an agent on whose devices it fits."""
        for at in range(len(self.fleet.devices)):
            taking = [g for g, each in enumerate(self.groups) if at in each.positions]
            self.model.add(sum(self.open[g] for g in taking) <= 1)
        for m in range(len(self.fleet.models)):
            self.model.add(sum(self.open[g] for g in self._groups_of(m)) >= 1)

    def _constrain_host(self) -> None:
        """
        Models that are not active fit into an agent's part of host memory, which is that of its
        devices, also while the smallest model is active.
        """
        sizes = [-(-model.loaded_bytes // _MIB) for model in self.fleet.models]
        has = {key: self.first[key] + self.warm[key] for key in self.fitting}
        for m, g in self.fitting:
            part = self.fleet.host_part_bytes(self.groups[g]) // _MIB
            others = sum(sizes[k] * has[k, g] for k in self._models_of(g)) - sizes[m] * has[m, g]
            self.model.add(has[m, g] <= self.open[g])
            self.model.add(others <= part).only_enforce_if(self.warm[m, g])
            self.model.add(others <= part).only_enforce_if(self.first[m, g])

    def _goals(self) -> Iterator[Any]:
        """Quantities to minimize, the most important first."""
        models, groups = self.fleet.models, self.groups
        yield -sum(more[0] for more in self.more)
        yield -sum(group.size * self.open[g] for g, group in enumerate(groups))
        yield sum(
            (groups[g].size - models[m].num_devices) * first for (m, g), first in self.first.items()
        )
        yield sum(k * more for counts in self.more for k, more in enumerate(counts))
        yield -sum(self._reachable())
        yield -sum(self.warm.values())
        yield sum((group.start % group.size) * self.open[g] for g, group in enumerate(groups))
        yield sum(m * first for (m, _), first in self.first.items())
        yield sum(
            groups[g].start * (len(models) - m) * first for (m, g), first in self.first.items()
        )

    def _reachable(self) -> list[Any]:
        """Variables of models that begin on an agent, or are warm on one."""
        found = []
        for m, more in enumerate(self.more):
            reachable = self.model.new_bool_var(f"reachable {m}")
            self.model.add(reachable <= more[0] + sum(self.warm[m, g] for g in self._groups_of(m)))
            found.append(reachable)
        return found

    def best(self) -> Any | None:
        """The solver with the best placement; None if there is none with this number of agents."""
        if self.fleet.num_agents is not None:
            self.model.add(sum(self.open) == self.fleet.num_agents)
        best = None
        for goal in self._goals():
            if (solver := self._minimized(goal)) is None:
                break
            best = solver
            self.model.add(goal <= solver.value(goal))
            self.model.clear_hints()
            for variable in (*self.first.values(), *self.warm.values()):
                self.model.add_hint(variable, solver.value(variable))
        return best

    def bounds(self) -> tuple[int, int]:
        """Smallest and largest number of agents of this fleet, which has room for each model."""
        number = sum(self.open)
        found = (self._minimized(number), self._minimized(-number))
        least, most = (0 if each is None else each.value(number) for each in found)
        return least, most

    def _minimized(self, goal: Any) -> Any | None:
        self.model.minimize(goal)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = _LIMIT
        found = solver.solve(self.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return solver if found else None

    def places(self, solver: Any) -> Iterator[AgentPlace]:
        """The agents of a solution."""
        models = self.fleet.models
        for g, group in enumerate(self.groups):
            own = self._models_of(g)
            chosen = [m for m in own if solver.value(self.first[m, g])]
            if not chosen:
                continue
            warm = [m for m in own if solver.value(self.warm[m, g])]
            sizes = [models[m].loaded_bytes for m in (*chosen, *warm)]
            yield AgentPlace(
                devices=tuple(group.positions),
                first=models[chosen[0]].name,
                models=tuple(models[m].name for m in own),
                wide_enough=tuple(each.name for each in models if each.num_devices <= group.size),
                warm=tuple(models[m].name for m in warm),
                warm_bytes=sum(sizes) - min(sizes),
            )
