"""Operations on the running engine: limits, and preemption inside a forward pass."""

from services.agent.backends.base import Capability, EngineBackend, SchedulingParameters
from services.agent.lso.capabilities import require
from services.agent.lso.executor import LsoExecutor
from services.agent.lso.results import LsoRefusedError, LsoResult, already
from solver.planning.lso.operations import Preempt, SetScheduling

PREEMPTS = "preempt inside a forward pass"
NO_LIMIT = 2**31 - 1
"""Value that turns a limit off: an engine applies the lower of its own limit and this one."""


class EngineOperations:
    """
    Implements LLM serving operations that act on the engine as a whole.

    Args:
        executor: Executor to register the operations with.
        engine: The backend.
    """

    def __init__(self, *, executor: LsoExecutor, engine: EngineBackend) -> None:
        self._engine = engine
        self._limits = SchedulingParameters(token_budget=NO_LIMIT, max_running=NO_LIMIT)
        executor.register(Preempt, self._preempt)
        executor.register(SetScheduling, self._set)

    async def _preempt(self, _lso: Preempt) -> LsoResult:
        require(self._engine, Capability.LAYER_PREEMPTION, PREEMPTS)
        if await self._engine.preempt_now():
            return LsoResult(message="the best-effort part is dropped at the next safepoint")
        return already("no forward pass with best-effort work was running")

    async def _set(self, lso: SetScheduling) -> LsoResult:
        require(self._engine, Capability.SCHEDULING, "change its limits while it runs")
        if lso.token_budget is None and lso.max_running is None:
            raise LsoRefusedError(
                "nothing to set: give a token budget or a limit of running requests"
            )
        limits = SchedulingParameters(
            token_budget=lso.token_budget or self._limits.token_budget,
            max_running=lso.max_running or self._limits.max_running,
        )
        if limits == self._limits:
            return already("these limits are already set")
        await self._engine.set_scheduling(limits)
        self._limits = limits
        running = self._engine.snapshot().max_running
        return LsoResult(
            message=(
                f"token budget at most {_limit(limits.token_budget)}, running requests at "
                f"most {running}"
            )
        )


def _limit(value: int) -> str:
    return "the engine's own limit" if value == NO_LIMIT else str(value)
