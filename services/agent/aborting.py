"""Ends runs on demand, and returns a request to its queue when the normal end of its run fails."""

import asyncio

from services.agent.backends.base import EngineBackend
from services.agent.state import AgentState, Ending, Pulled, Run
from shared.broker.protocol import Settlement


def end_run(state: AgentState, engine: EngineBackend, run: Run, ending: Ending) -> None:
    """Request the end of a run; the run's task then handles the outcome of the request."""
    if run.ending is None:
        run.ending = ending
        task = asyncio.ensure_future(engine.abort(run.engine_id))
        state.aborts.add(task)
        task.add_done_callback(state.aborts.discard)


async def give_back(state: AgentState, pulled: Pulled) -> None:
    """
    Return an unsettled request unchanged to its queue; the queue's delivery limit bounds the
    repeats.
    """
    pulled.leaving = True
    if pulled.deliveries:
        state.depart(pulled.request.request_id, "returned when its ending failed")
    while pulled.deliveries:
        await pulled.deliveries.pop().settle(Settlement.REQUEUE)
