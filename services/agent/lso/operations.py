"""Registration of all operations of the agent."""

from dataclasses import dataclass

from services.agent.admission import Admission
from services.agent.backends.base import EngineBackend
from services.agent.endings import Endings
from services.agent.lso.engine import EngineOperations
from services.agent.lso.executor import LsoExecutor
from services.agent.lso.models import ModelOperations
from services.agent.lso.pulls import PullOperations
from services.agent.lso.runs import RunOperations
from services.agent.lso.situation import Observer
from services.agent.puller import Puller
from services.agent.reporting import Reporter
from services.agent.state import AgentState
from shared.runtime.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """
    Implementations of operations; the activation of models uses them directly, without the
    executor.
    """

    runs: RunOperations
    models: ModelOperations


def register_operations(
    executor: LsoExecutor,
    *,
    state: AgentState,
    engine: EngineBackend,
    endings: Endings,
    admission: Admission,
    puller: Puller,
    observer: Observer,
    reporter: Reporter,
    clock: Clock,
) -> Operations:
    """Register the implementation of each kind of operation with *executor*."""
    runs = RunOperations(
        executor=executor,
        state=state,
        engine=engine,
        endings=endings,
        admission=admission,
        observer=observer,
    )
    models = ModelOperations(
        executor=executor,
        state=state,
        engine=engine,
        runs=runs,
        reporter=reporter,
        weights=observer.sizes.weights,
        clock=clock,
    )
    EngineOperations(executor=executor, engine=engine)
    PullOperations(executor=executor, state=state, puller=puller)
    return Operations(runs=runs, models=models)
