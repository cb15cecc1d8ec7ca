"""LLM serving operations on models: activate, warm, cool."""

from collections.abc import Callable, Mapping

from services.agent.backends.base import Capability, EngineBackend
from services.agent.lso.capabilities import require
from services.agent.lso.executor import LsoExecutor
from services.agent.lso.results import LsoRefusedError, LsoResult, already
from services.agent.lso.runs import RunOperations
from services.agent.reporting import Reporter
from services.agent.state import AgentState
from shared.contracts.base import ModelName
from shared.contracts.errors import NoRoomError
from shared.contracts.telemetry import ModelActivated, ModelState, Residency
from shared.runtime.clock import Clock
from solver.planning.lso.operations import Activate, Cool, Rule, Warm, because

WARMS = "load models into host memory ahead of time"


class ModelOperations:
    """
    Implements operations on models.

    Args:
        executor: Executor to register the operations with.
        state: The agent's state; this class writes `model`, and so does the restart of a dead
            engine.
        runs: Evicts or finishes the runs of the instance.
        reporter: Publishes swaps.
        weights: Size in bytes of each base model that this instance may serve.
    """

    def __init__(
        self,
        *,
        executor: LsoExecutor,
        state: AgentState,
        engine: EngineBackend,
        runs: RunOperations,
        reporter: Reporter,
        weights: Mapping[ModelName, int],
        clock: Clock,
    ) -> None:
        self._state = state
        self._engine = engine
        self._runs = runs
        self._reporter = reporter
        self._weights = weights
        self._clock = clock
        self.on_activated: Callable[[], None] = lambda: None
        """Called when another model has become active, before requests for it are pulled."""
        executor.register(Activate, self._activate)
        executor.register(Warm, self._warm)
        executor.register(Cool, self._cool)

    def check(self, model: ModelName) -> None:
        """
        Check that this instance serves the model.

        Raises:
            LsoRefusedError: The instance does not serve the model; the message lists the models
                that it serves.
        """
        if model not in self._weights:
            known = ", ".join(sorted(self._weights))
            raise LsoRefusedError(
                f"this instance does not serve the model {model!r}; it serves: {known}"
            )

    def residency_of(self, model: ModelName) -> Residency:
        """Current residency of *model* on this instance."""
        return self._state_of(model).residency

    def _state_of(self, model: ModelName) -> ModelState:
        cold = ModelState(model=model, residency=Residency.COLD)
        models = self._engine.snapshot().models
        return next((entry for entry in models if entry.model == model), cold)

    async def _activate(self, lso: Activate) -> LsoResult:
        state, model = self._state, lso.model
        self.check(model)
        if state.model == self._engine.snapshot().model == model and self._engine.alive:
            return already(f"{model} is active")
        if state.draining:
            raise LsoRefusedError("the instance is draining")
        if state.model is not None:
            require(self._engine, Capability.MODEL_SWAP, "change its model")
        old, source, path = state.model, self.residency_of(model), self._state_of(model).path
        with state.swap(model):
            await self._reporter.report()
            drain_s = lso.drain_s if old is not None else 0.0
            left = await self._runs.finish_runs(drain_s)
            await self._runs.evict_within(left, because(Rule.DRAIN_OVER, drain_s=drain_s))
            try:
                activate_s = await self._engine.activate(model)
            finally:
                # After a failure or a cancellation, the active model is the one that the engine
                # reports.
                state.model = self._engine.snapshot().model
            state.totals.swaps += old is not None
            self.on_activated()
        await self._reporter.activated(
            ModelActivated(
                instance_id=state.instance_id,
                model=model,
                source=source,
                duration_s=activate_s,
                at=self._clock.now(),
                path=path,
            )
        )
        state.wake()
        return LsoResult(
            message=f"active from {source.value} in {activate_s:.3g} s"
            + (f", {len(left)} evicted" if left else ""),
            num_bytes=self._weights[model],
        )

    async def _warm(self, lso: Warm) -> LsoResult:
        self.check(lso.model)
        require(self._engine, Capability.WARM_START, WARMS)
        if (residency := self.residency_of(lso.model)) is not Residency.COLD:
            return already(f"{lso.model} is {residency.value}")
        try:
            duration_s = await self._engine.warm(lso.model)
        except NoRoomError as error:
            raise LsoRefusedError(str(error)) from error
        return LsoResult(message=f"warm in {duration_s:.3g} s", num_bytes=self._weights[lso.model])

    async def _cool(self, lso: Cool) -> LsoResult:
        self.check(lso.model)
        require(self._engine, Capability.WARM_START, WARMS)
        residency = self.residency_of(lso.model)
        if residency is Residency.ACTIVE:
            raise LsoRefusedError(f"{lso.model} is active")
        if residency is Residency.COLD:
            return already(f"{lso.model} is cold")
        await self._engine.cool(lso.model)
        return LsoResult(message="cold", num_bytes=self._weights[lso.model])
