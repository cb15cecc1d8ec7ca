"""Which model is active: following the plan, swapping, and bringing a dead engine back."""

import asyncio
import contextlib
from dataclasses import replace

import structlog

from services.agent.backends.base import EngineBackend
from services.agent.holding import held_prefill_s
from services.agent.lso.executor import LsoExecutor
from services.agent.lso.operations import Operations
from services.agent.lso.results import LsoRefusedError, LsoResult, already
from services.agent.lso.situation import Observer
from services.agent.orphans import Orphanhood
from services.agent.retries import ActivationRetries
from services.agent.sources import sources_of
from services.agent.state import AgentState
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import ContractError, EngineError
from shared.contracts.lanes import LaneKey, LaneLayout, model_of
from shared.contracts.plans import PlanPublished, Segment
from shared.runtime.clock import Clock
from shared.runtime.tasks import pause, poll_until
from solver.planning.lso_actions import lso_actions
from solver.planning.lso_situation import HeadChange
from solver.planning.lsos import ORDERED, Activate, Evict, Reason, Rule, because

log = structlog.get_logger()
CHECK_PERIOD_S = 0.2
RESTART_PAUSE_S = 1.0
NOTICE_MEMORY_S = 300.0


class ModelResidency:
    """
    Follows the plan's first segment; without a plan, work that waits for another model.

    Args:
        state: The agent's.
        engine: The backend.
        executor: Carries out what a plan asks for.
        observer: Sees the instance that the plan meets.
        operations: Empty the instance and know its models.
        layout: For the deadlines of lanes.
        servable: Base models this instance may serve.
        orphanhood: Knows whether anybody plans for this instance, and what waits if not.
        clock: Wall time.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        engine: EngineBackend,
        executor: LsoExecutor,
        observer: Observer,
        operations: Operations,
        layout: LaneLayout,
        servable: tuple[ModelName, ...],
        orphanhood: Orphanhood,
        clock: Clock,
    ) -> None:
        self._state = state
        self._engine = engine
        self._executor = executor
        self._observer = observer
        self._runs = operations.runs
        self._models = operations.models
        self._layout = layout
        self._servable = servable
        self._orphanhood = orphanhood
        self._clock = clock
        self._changed = asyncio.Event()
        self._ordered: ModelName | None = None
        """What an operator wants active, until a later plan comes."""
        self._lost: ModelName | None = None
        """What an engine had that died, and could not have again."""
        self._retries = ActivationRetries(first_pause_s=RESTART_PAUSE_S)
        self._followed: tuple[Segment, ...] = ()
        """The virtual queue that the instance was last made to follow."""
        operations.models.on_activated = self._activated

    def plan_changed(self, plan: PlanPublished) -> None:
        """Take in a plan; lower epochs are ignored, so a thawed old leader changes nothing."""
        if self._state.plan is not None and plan.epoch < self._state.plan.epoch:
            return
        if self._state.plan is None or plan.epoch > self._state.plan.epoch:
            self._ordered = None
        self._state.plan = plan
        self._state.plan_at = self._clock.now()
        self._changed.set()

    def noticed(self, queue: str) -> None:
        """
        Somebody put work into *queue*.

        Raises:
            ContractError: No work queue is called so.
        """
        if queue.startswith(("lane.", "overflow.")):
            LaneKey.parse(queue)
        elif queue.startswith("resume.") and not queue.rpartition(".")[2].isdecimal():
            raise ContractError(f"not a resume queue's name: {queue!r}")
        now = self._clock.now()
        known = queue in self._state.noticed
        self._state.noticed[queue] = now
        if self._state.order.nonempty(queue, now, held_s=held_prefill_s(self._state)):
            self._state.pull_wake.set()
        elif not known and model_of(queue) in (self._state.model, None):
            self._changed.set()

    async def work(self, stop: asyncio.Event) -> None:
        """Follow plans and keep the engine up until *stop*."""
        while not stop.is_set():
            self._changed.clear()
            if not self._engine.alive:
                await self._revive(stop)
            target = self._target()
            if target is not None and not self._state.draining:
                await self._follow(target)
            if self._may_adopt():
                await self._adopt()
            self._set_sources()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), CHECK_PERIOD_S)

    def _target(self) -> ModelName | None:
        """The model that should be active now."""
        state = self._state
        if self._ordered is not None:
            return self._ordered
        if self._orphanhood.has_plan():
            segments = self._segments()
            return segments[0].model if segments else state.model or self._lost
        if state.model is not None:
            return state.model
        return self._orphanhood.noticed_model() or self._lost

    def _may_adopt(self) -> bool:
        """Whether it is up to this instance to look for work of other models."""
        state = self._state
        if state.draining or state.swapping or state.model is None or self._ordered is not None:
            return False
        return self._orphanhood.is_alone()

    async def _adopt(self) -> None:
        """Bring up a model whose work waits for nobody, unless another instance does."""
        model = await self._orphanhood.look()
        if model is None:
            return
        async with self._orphanhood.claim(model) as is_ours:
            # A plan or work may have come while the broker was asked.
            if is_ours and self._may_adopt():
                log.info("model.adopted", model=model, instead_of=self._state.model)
                await self._follow(model)

    def _segments(self) -> tuple[Segment, ...]:
        """The plan's, of models that this instance may serve."""
        segments = self._state.plan.queue.segments if self._state.plan is not None else ()
        return tuple(segment for segment in segments if segment.model in self._servable)

    async def activate(self, model: ModelName) -> LsoResult:
        """
        An operator's order: swap to *model*, and keep it until a later plan comes.

        Raises:
            LsoRefusedError: This instance serves no such model, or drains.
        """
        self._models.check(model)
        if self._state.draining:
            raise LsoRefusedError("the instance drains")
        self._ordered = model
        result = await self._swap((Segment(model=model),), reason=ORDERED)
        if not result.ok:
            self._ordered = None
        return result

    async def _follow(self, target: ModelName) -> None:
        """Make the instance what the plan, or the order, says: QLM §5's table."""
        state = self._state
        planned = self._segments()
        queue = planned if planned and planned[0].model == target else (Segment(model=target),)
        if target != state.model:
            if not self._retries.rests(target, self._clock.now()):
                await self._try(queue)
        elif _shape(queue) != _shape(self._followed):
            change = HeadChange(old_head=self._followed[0] if self._followed else None, queue=queue)
            self._followed = queue
            self._set_sources()
            await self._executor.follow(lso_actions(change, self._observer.situation()))

    async def _try(self, queue: tuple[Segment, ...]) -> None:
        """Swap; if that fails, another time: soon if nothing else is served here."""
        head = queue[0].model
        result = await self._swap(queue)
        if result.ok:
            self._retries.succeeded(head)
        elif self._state.model is None:
            await asyncio.sleep(RESTART_PAUSE_S)
        else:
            pause_s = self._retries.failed(head, self._clock.now())
            log.warning(
                "model.not_activated", model=head, serving=self._state.model, again_in_s=pause_s
            )

    async def _swap(self, queue: tuple[Segment, ...], *, reason: Reason | None = None) -> LsoResult:
        """Empty the instance and activate the head's model; how the activation ended."""
        state = self._state
        change = HeadChange(old_head=self._followed[0] if self._followed else None, queue=queue)
        lsos = lso_actions(change, self._observer.situation())
        if reason is not None:
            lsos = tuple(replace(lso, reason=reason) for lso in lsos)
        with state.swap():  # from here on, so that nothing is admitted in between
            results = await self._executor.follow(lsos)
        for lso, result in results:
            if isinstance(lso, Activate):
                if result.ok:
                    self._followed = queue
                return result
        failed = [result for _, result in results if not result.ok]
        return failed[-1] if failed else already(f"{queue[0].model} is active")

    async def empty(self, *, drain_s: Seconds) -> None:
        """Hand back the window, let runs finish for *drain_s*, evict the rest."""
        left = await self._runs.finish_runs(drain_s)
        if left:
            reason = because(Rule.DRAIN_OVER, drain_s=drain_s)
            await self._executor.run(Evict(request_ids=left, reason=reason))
        await poll_until(lambda: not self._state.runs)

    async def hand_back_window(self) -> None:
        """Return what was pulled and does not run. Pulling must have been stopped."""
        await self._runs.hand_back_window()

    async def _revive(self, stop: asyncio.Event) -> None:
        """Bring a dead engine up again with the model that it had."""
        state = self._state
        state.totals.crashes += 1
        log.error("engine.died", instance_id=state.instance_id, runs=len(state.runs))
        async with self._executor.exclusive():
            with state.swap():
                # Another instance may serve them meanwhile, and this one may never come back.
                await self.hand_back_window()
                while not stop.is_set() and not await self._restarted():
                    await pause(stop, RESTART_PAUSE_S)
                if not stop.is_set():
                    await self._reactivate()

    async def _restarted(self) -> bool:
        """Start the engine, without a model; whether that worked."""
        try:
            await self._engine.start()
        except EngineError as error:
            log.error("engine.restart_failed", error=str(error))
            return False
        return True

    async def _reactivate(self) -> None:
        """Give the engine the model that it had; if it cannot have it, plans and orders decide."""
        model = self._state.model
        try:
            if model is not None:
                await self._engine.activate(model)
        except EngineError as error:
            log.error("engine.restart_failed", model=model, error=str(error))
            self._lost = model
            self._state.model = self._engine.snapshot().model
            self._followed = ()
        else:
            log.info("engine.restarted", model=model)

    def _activated(self) -> None:
        self._orphanhood.busy()
        self._set_sources()

    def _set_sources(self) -> None:
        state, now = self._state, self._clock.now()
        if state.model is None:
            return
        state.noticed = {
            queue: at for queue, at in state.noticed.items() if now - at < NOTICE_MEMORY_S
        }
        lanes = {
            quota.lane
            for segment in (state.plan.queue.segments if state.plan else ())
            if segment.model == state.model
            for quota in segment.lanes
        }
        lanes.update(queue for queue in state.noticed if model_of(queue) == state.model)
        sources = sources_of(state.instance_id, state.model, lanes, self._layout)
        state.order.set_sources(sources, now)
        state.pull_wake.set()


def _shape(queue: tuple[Segment, ...]) -> tuple[tuple[ModelName, frozenset[str]], ...]:
    """What makes a virtual queue another: models in order and their lanes, not the quotas."""
    return tuple(
        (segment.model, frozenset(quota.lane for quota in segment.lanes)) for segment in queue
    )
