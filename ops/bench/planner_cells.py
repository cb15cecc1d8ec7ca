"""Measurements of the planner benchmark, each in its own process; times are thread CPU time."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ops.baselines.planning.atcs import atcs, best_atcs
from ops.baselines.planning.exact import exact
from ops.baselines.planning.shepherd import shepherd
from ops.baselines.planning.spreading import by_chance, round_robin
from ops.baselines.planning.vehicle_routing import routed
from ops.bench.planner_exhaustive import optimum
from ops.bench.planner_instances import instance, is_interactive, urgent_arrivals
from ops.bench.planner_keeping import kept, num_moved, total_cost
from ops.sim.plans import judge
from solver.planning.generator import generate, kept_order
from solver.planning.orders.queues import OrderPolicy
from solver.planning.orders.rules import edf, edf_batching, fcfs
from solver.planning.problem.objective import plan_cost
from solver.planning.problem.problem import PlanningProblem, QueueOrder

NUM_SCENARIOS = 64
NUM_URGENT = 16
"""Number of urgent groups that arrive together before a replan."""
TINY_BUDGET_S = 0.1
PROOF_WORK, PROOF_TIME_S = 200.0, 300.0
"""Work limit and time limit of CP-SAT; most proofs take a second, some take a minute."""
_SAME = 1e-9
"""Largest difference of two plan costs that count as equal."""


class Size(NamedTuple):
    """Size of a planning problem."""

    groups: int
    instances: int
    models: int

    def __str__(self) -> str:
        return f"{self.groups}x{self.instances}"


SMALL, MIDDLE, LARGE = Size(200, 16, 6), Size(800, 50, 8), Size(1600, 100, 12)

RULES: dict[str, OrderPolicy] = {
    "fcfs": fcfs,
    "edf": edf,
    "edf-batching": edf_batching,
    "atcs": atcs,
    "best of 9 atcs": lambda problem: best_atcs(problem, total_cost),
    "shepherd": shepherd,
    "round robin": round_robin,
    "random": lambda problem: by_chance(problem, np.random.default_rng(0)),
}
"""Rules that are baselines of the plan generator."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one measurement of the planner benchmark."""

    kind: str
    """
    Kind of measurement.

    `search` (one plan), `rules` (each of `RULES`), `replan` (after urgent arrivals), `tiny`
    (against the best of all plans), `routing` (against OR-Tools in equal time), `published`
    (planning from lane counters) or `loop` (stall of the event loop).
    """
    size: Size
    seed: int
    """Seed of the planning problem, and of the search for a plan."""
    budget_s: float = 0.0
    """
    Search budget. For `replan`, the budget of the search for the plan in force; for `routing`, the
    wall time of OR-Tools.
    """

    def problem(self) -> PlanningProblem:
        """The planning problem of the cell."""
        return instance(self.seed, *self.size)


def measure(cell: Cell) -> dict[str, Any]:
    """Run the measurement of the cell; return JSON-able figures."""
    return _KINDS[cell.kind](cell)


def _search(cell: Cell) -> dict[str, Any]:
    problem = cell.problem()
    begun_s = time.thread_time()
    plan = generate(problem, budget_s=cell.budget_s, clock=time.thread_time, seed=cell.seed)
    spent_s = time.thread_time() - begun_s
    return _judged(problem, plan.order) | {"spent_s": spent_s, "moves": plan.num_moves}


def _rules(cell: Cell) -> dict[str, Any]:
    problem = cell.problem()
    figures = {}
    for name, rule in RULES.items():
        begun_s = time.thread_time()
        order = rule(problem)
        spent_s = time.thread_time() - begun_s
        figures[name] = _judged(problem, order) | {"spent_s": spent_s}
    return figures


def _replan(cell: Cell) -> dict[str, Any]:
    """Replan after urgent arrivals, and compare with the plan in force plus the arrivals."""
    before = cell.problem()
    clock = time.thread_time
    running = generate(before, budget_s=cell.budget_s, clock=clock, seed=cell.seed).order
    problem = urgent_arrivals(before, running, NUM_URGENT, cell.seed)
    keeping = kept(problem)
    begun_s = clock()
    plan = generate(problem, budget_s=0.1, clock=clock, seed=cell.seed + 1)
    spent_s = clock() - begun_s
    by_generator = plan_cost(problem, kept_order(problem)).total
    figures = _judged(problem, plan.order)
    return figures | {
        "spent_s": spent_s,
        "moves": plan.num_moves,
        "moved_share": num_moved(problem, plan.order) / before.num_groups,
        "over_keeping": figures["cost"] - float(min(total_cost(problem, keeping), by_generator)),
        "keeping_attainment": _judged(problem, keeping)["attainment"],
    }


def _tiny(cell: Cell) -> dict[str, Any]:
    problem = cell.problem()
    plan = generate(problem, budget_s=cell.budget_s, clock=time.thread_time, seed=cell.seed)
    over = total_cost(problem, plan.order) - optimum(problem)
    program = exact(problem, work_limit=PROOF_WORK, time_limit_s=PROOF_TIME_S)
    return {
        "optimal": bool(over <= _SAME),
        "over_optimum": over,
        "proved": program.proved,
        "program_over_optimum": total_cost(problem, program.order)
        - (total_cost(problem, plan.order) - over),
    }


def _routing(cell: Cell) -> dict[str, Any]:
    """Compare OR-Tools with the annealer, which gets all the CPU time that OR-Tools used."""
    problem = cell.problem()
    begun_s = time.thread_time()
    order = routed(problem, time_limit_s=cell.budget_s)
    spent_s = time.thread_time() - begun_s
    plan = generate(problem, budget_s=spent_s, clock=time.thread_time, seed=cell.seed)
    return {
        "spent_s": spent_s,
        "routing": _judged(problem, order),
        "annealer": _judged(problem, plan.order),
    }


def _published(cell: Cell) -> dict[str, Any]:
    """
    Measure planning from lane counters in a separate process, because peak memory is a figure.
    """
    return _apart("planner_published", cell)


def _loop(cell: Cell) -> dict[str, Any]:
    """
    Measure the stall of an event loop in a separate process, with an event loop and a plan worker.
    """
    return _apart("planner_loop", cell)


def _apart(module: str, cell: Cell) -> dict[str, Any]:
    command = [sys.executable, "-m", f"ops.bench.{module}", str(cell.seed)]
    done = subprocess.run(command, check=True, capture_output=True)
    figures: dict[str, Any] = msgspec.json.decode(done.stdout)
    return figures


def _judged(problem: PlanningProblem, order: QueueOrder) -> dict[str, Any]:
    """Figures of a plan; all plans for one problem are judged in the same scenarios."""
    cost = plan_cost(problem, order)  # raises an error if the plan is invalid
    verdict = judge(problem, order, num_scenarios=NUM_SCENARIOS)
    return {
        "attainment": float(verdict.attainment().mean()),
        "interactive": float(verdict.attainment(is_interactive(problem)).mean()),
        "expected": float(1 - cost.late_share),
        "cost": float(cost.total),
        "swaps": verdict.swaps,
    }


_KINDS: dict[str, Callable[[Cell], dict[str, Any]]] = {
    "search": _search,
    "rules": _rules,
    "replan": _replan,
    "tiny": _tiny,
    "routing": _routing,
    "published": _published,
    "loop": _loop,
}
