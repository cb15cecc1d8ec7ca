"""How a run is ended from outside, and what is left when its own ending failed."""

import asyncio

from services.agent.backends.base import EngineBackend
from services.agent.state import AgentState, Ending, Pulled, Run
from shared.broker.protocol import Settlement


def end_run(state: AgentState, engine: EngineBackend, run: Run, ending: Ending) -> None:
    """Ask a run to end; its own task sees to what becomes of it."""
    if run.ending is None:
        run.ending = ending
        task = asyncio.ensure_future(engine.abort(run.engine_id))
        state.aborts.add(task)
        task.add_done_callback(state.aborts.discard)


async def give_back(state: AgentState, pulled: Pulled) -> None:
    """What is not settled goes back to its queue as it came; the delivery limit bounds it."""
    pulled.leaving = True
    if pulled.deliveries:
        state.depart(pulled.request.request_id, "returned when its ending failed")
    while pulled.deliveries:
        await pulled.deliveries.pop().settle(Settlement.REQUEUE)
