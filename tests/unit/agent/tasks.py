"""The agent's loops, run for the duration of a block."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from services.agent.aborting import end_run
from services.agent.lso.results import LsoResult
from services.agent.state import Ending
from solver.planning.lso.operations import Lso
from tests.unit.agent.rig import AgentRig


@asynccontextmanager
async def working(loop: Coroutine[object, object, None], rig: AgentRig) -> AsyncIterator[None]:
    """Run *loop* until the block ends; then the loop must end by itself."""
    task = asyncio.create_task(loop)
    try:
        yield
    finally:
        rig.stop.set()
        rig.state.wake()
        await asyncio.wait_for(task, 60)


@asynccontextmanager
async def admitting(rig: AgentRig) -> AsyncIterator[None]:
    """Run admission until the block ends; no run may then remain."""
    async with asyncio.TaskGroup() as tasks:
        async with working(rig.admission.work(rig.stop, tasks), rig):
            yield
        for run in tuple(rig.state.runs.values()):
            end_run(rig.state, rig.engine, run, Ending.STOPPED)


async def run_lso(rig: AgentRig, lso: Lso) -> LsoResult:
    """Execute one operation."""
    (result,) = await asyncio.wait_for(rig.executor.run(lso), 60)
    return result


def counted(rig: AgentRig, name: str, **labels: str) -> float | None:
    """Value of one of the agent's metric series."""
    return rig.metrics.get_sample_value(f"headway_agent_{name}", labels)
