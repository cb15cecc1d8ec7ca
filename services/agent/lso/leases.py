"""Time limits of swapped-out requests."""

from services.agent.lso.executor import LsoExecutor
from services.agent.state import AgentState
from shared.contracts.base import Seconds
from shared.runtime.clock import Clock
from solver.planning.lso.operations import Evict, Rule, because


class SwapLeases:
    """
    Ends the rest period and the lease of each swapped-out request.

    Args:
        lease_s: Duration of every lease in seconds, for the logged reason.
    """

    def __init__(
        self, *, state: AgentState, executor: LsoExecutor, lease_s: Seconds, clock: Clock
    ) -> None:
        self._state = state
        self._executor = executor
        self._lease_s = lease_s
        self._clock = clock

    async def check(self) -> None:
        """
        Return requests to the window after their rest period, and evict requests with expired
        leases.
        """
        now, ended = self._clock.now(), []
        for request_id, swapped in self._state.swapped_out.items():
            if swapped.lease_until <= now:
                ended.append(request_id)
            elif swapped.resume_at <= now:
                self._state.unrest(request_id)
        if ended:
            reason = because(Rule.LEASE_ENDED, lease_s=self._lease_s)
            await self._executor.run(Evict(request_ids=tuple(ended), reason=reason))
