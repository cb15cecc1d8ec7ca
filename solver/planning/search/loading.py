"""Loading of the search's kernels before the first plan is requested."""

import numpy as np

from solver.planning.problem.problem import (
    GroupArrays,
    InstanceArrays,
    PlanningProblem,
    RunningPlan,
)
from solver.planning.search.annealing import Annealer
from solver.planning.search.dispatch import LOOKAHEADS, dispatch
from solver.planning.search.evaluation import load
from solver.planning.search.insertion import insert
from solver.planning.search.state import empty_state
from solver.planning.search.tables import tables_of


def compile_kernels() -> None:
    """
    Run each kernel once: takes a second if compiled kernels are cached, otherwise almost a minute.
    """
    problem = _smallest()
    tables = tables_of(problem)
    none = np.zeros(0, dtype=np.int64)
    state = empty_state(problem)
    load(tables, state, none, np.zeros(problem.num_instances + 1, dtype=np.int64))
    insert(tables, state, tables.served)
    Annealer(tables, state, seed=0).run(1, hot=1.0, cold=0.5)
    dispatch(tables, empty_state(problem), tables.served, *LOOKAHEADS[0])


def _smallest() -> PlanningProblem:
    """Planning problem with two groups and one instance."""
    two, by_device = np.ones(2), np.ones((1, 2))
    return PlanningProblem(
        groups=GroupArrays(
            model=np.zeros(2, dtype=np.int32),
            num_requests=two,
            weight=two,
            deadline_s=two,
            spread_s=two,
            slo_s=two,
            relegated_share=np.zeros(2),
            work_s=by_device,
            work_var=by_device,
            tail_s=by_device,
            tail_var=by_device,
            drain_s=by_device,
        ),
        instances=InstanceArrays(
            device=np.zeros(1, dtype=np.int32),
            active=np.zeros(1, dtype=np.int32),
            activate_s=np.ones((1, 1)),
            withheld=np.zeros((1, 1), dtype=np.bool_),
            available_s=np.zeros(1),
            available_var=np.zeros(1),
            drain_s=np.zeros(1),
            rate_error=np.zeros((1, 1)),
            express_per_s=np.zeros(1),
        ),
        running=RunningPlan(
            instance=np.full(2, -1, dtype=np.int32), position=np.zeros(2, dtype=np.int32)
        ),
    )
