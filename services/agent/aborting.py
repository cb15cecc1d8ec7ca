"""How a run is ended from outside."""

import asyncio

from services.agent.backends.base import EngineBackend
from services.agent.state import AgentState, Ending, Run


def end_run(state: AgentState, engine: EngineBackend, run: Run, ending: Ending) -> None:
    """Ask a run to end; its own task sees to what becomes of it."""
    if run.ending is None:
        run.ending = ending
        task = asyncio.ensure_future(engine.abort(run.engine_id))
        state.aborts.add(task)
        task.add_done_callback(state.aborts.discard)
