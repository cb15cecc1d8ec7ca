"""The pull operation: one immediate round of the agent's pull loops."""

from services.agent.lso.executor import LsoExecutor
from services.agent.lso.results import LsoRefusedError, LsoResult, already
from services.agent.puller import Puller
from services.agent.state import AgentState
from solver.planning.lso.operations import Pull


class PullOperations:
    """
    Implements the pull operation.

    Args:
        executor: Executor to register the operation with.
        puller: Pulls from the instance's queues while there is room.
    """

    def __init__(self, *, executor: LsoExecutor, state: AgentState, puller: Puller) -> None:
        self._state = state
        self._puller = puller
        executor.register(Pull, self._pull)

    async def _pull(self, lso: Pull) -> LsoResult:
        state = self._state
        if state.draining:
            raise LsoRefusedError("the instance is draining")
        if state.model is None or state.swapping:
            raise LsoRefusedError("no model is active")
        room = self._puller.room()
        if not room.room:
            raise LsoRefusedError(
                f"no room: {room.requests} of {room.max_requests} requests, {room.backlog_s:.3g} "
                f"of {room.max_backlog_s:g} s, {room.tokens} of {room.max_tokens} tokens"
            )
        pulled = await self._puller.pull_now(lso.count)
        if pulled == 0:
            queues = len(state.order.queues)
            return already(f"no request that may be pulled waits in {queues} queues")
        return LsoResult(message=f"{pulled} pulled")
