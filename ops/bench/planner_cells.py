"""What the planner's bench measures, one process for each; times are CPU time of its thread."""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ops.bench.planner_exhaustive import optimum
from ops.bench.planner_instances import instance, is_interactive, urgent_arrivals
from ops.bench.planner_keeping import kept, num_moved, total_cost
from ops.sim.plans import judge
from solver.planning.generator import generate, kept_order
from solver.planning.objective import plan_cost
from solver.planning.order_baselines.atcs import atcs, best_atcs
from solver.planning.order_baselines.edf import edf, edf_batching
from solver.planning.order_baselines.fcfs import fcfs
from solver.planning.order_baselines.queues import OrderPolicy
from solver.planning.order_baselines.shepherd import shepherd
from solver.planning.order_baselines.spreading import by_chance, round_robin
from solver.planning.problem import PlanningProblem, QueueOrder
from solver.planning.programs.exact import exact
from solver.planning.programs.routing import routed

NUM_SCENARIOS = 64
NUM_URGENT = 16
"""Groups that come at once before a replan."""
TINY_BUDGET_S = 0.1
PROOF_WORK, PROOF_TIME_S = 200.0, 300.0
"""Of CP-SAT; most proofs take a second, few a minute."""
_SAME = 1e-9
"""Costs that differ by less are one."""


class Size(NamedTuple):
    """Of a problem."""

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
"""The plan generator is measured against these."""


SOURCES = (
    "solver/planning", "ops/sim/plans.py", "services/planner/view.py", "services/planner/state.py",
    "ops/bench/planner_cells.py", "ops/bench/planner_exhaustive.py",
    "ops/bench/planner_instances.py", "ops/bench/planner_keeping.py",
    "ops/bench/planner_loop.py", "ops/bench/planner_published.py",
    "services/planner/plan_worker.py",
)  # fmt: skip
"""What figures depend on."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    kind: str
    """
    What is measured.

    `search` (one plan), `rules` (each of `RULES`), `replan` (after urgent arrivals), `tiny`
    (against all plans), `routing` (OR-Tools in as much time), `published` (from counters) or
    `loop` (how long the event loop is held).
    """
    size: Size
    seed: int
    """Of the problem, and of the search in it."""
    budget_s: float = 0.0
    """Of the search; of the plan in force before a replan, and of OR-Tools' search by the clock."""

    def problem(self) -> PlanningProblem:
        """What is planned for."""
        return instance(self.seed, *self.size)


def measure(cell: Cell) -> dict[str, Any]:
    """What *cell* gives; JSON-able."""
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
    """The plan in force is what a search found in `budget_s`; keeping it has its arrivals, too."""
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
    """The annealer gets the CPU time that OR-Tools took, its start and model included."""
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
    """In a process of its own: its memory is what counts."""
    return _apart("planner_published", cell)


def _loop(cell: Cell) -> dict[str, Any]:
    """In a process of its own: with an event loop, and a worker."""
    return _apart("planner_loop", cell)


def _apart(module: str, cell: Cell) -> dict[str, Any]:
    command = [sys.executable, "-m", f"ops.bench.{module}", str(cell.seed)]
    done = subprocess.run(command, check=True, capture_output=True)
    figures: dict[str, Any] = msgspec.json.decode(done.stdout)
    return figures


def _judged(problem: PlanningProblem, order: QueueOrder) -> dict[str, Any]:
    """Of every plan for one problem in the same scenarios."""
    cost = plan_cost(problem, order)  # refuses what is no plan
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
