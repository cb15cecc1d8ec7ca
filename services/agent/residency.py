"""Controls the active model: follows plans, swaps models, and restarts a dead engine."""

import asyncio
import contextlib
from collections.abc import Collection
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
from solver.planning.lso.actions import lso_actions
from solver.planning.lso.operations import ORDERED, Activate, Evict, Reason, Rule, because
from solver.planning.lso.situation import HeadChange

log = structlog.get_logger()
CHECK_PERIOD_S = 0.2
RESTART_PAUSE_S = 1.0
RETIREMENT_S = 15.0
"""Maximum duration of a leader's attempt to delete a queue."""
NOTICE_MEMORY_S = 300.0


class ModelResidency:
    """
    Activates the model of the plan's first segment, or without a plan a model with waiting work.

    Args:
        executor: Executes the operations that a plan requires.
        observer: Provides the instance's situation when a plan arrives.
        operations: Empty the instance and report its models.
        layout: Queue layout, for the deadlines of lanes.
        servable: Base models that this instance may serve.
        orphanhood: Detects a missing plan, and finds waiting work.
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
        servable: Collection[ModelName],
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
        """Model that an operator ordered; the model stays active until a later plan arrives."""
        self._lost: ModelName | None = None
        """Model of a dead engine that could not be activated again."""
        self._retries = ActivationRetries(first_pause_s=RESTART_PAUSE_S)
        self._followed: tuple[Segment, ...] = ()
        """Virtual queue that was last applied to the instance."""
        operations.models.on_activated = self._activated

    def plan_changed(self, plan: PlanPublished) -> None:
        """Store a plan; ignore a plan with a lower epoch, e.g. of a stalled former leader."""
        if self._state.plan is not None and plan.epoch < self._state.plan.epoch:
            return
        if self._state.plan is None or plan.epoch > self._state.plan.epoch:
            self._ordered = None
        self._state.plan = plan
        self._state.plan_at = self._clock.now()
        self._changed.set()

    def noticed(self, queue: str) -> None:
        """
        Record that a request was put into the queue *queue*.

        Raises:
            ContractError: *queue* is not the name of a work queue.
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

    def retiring(self, queues: tuple[str, ...]) -> None:
        """Stop polling *queues*, which the leader is about to delete, until the retirement ends."""
        until = self._clock.now() + RETIREMENT_S
        for queue in queues:
            self._state.order.pause(queue, until)

    def retired(self, *, deleted: tuple[str, ...], kept: tuple[str, ...]) -> None:
        """Handle the end of a queue retirement."""
        now = self._clock.now()
        for queue in deleted:
            self._state.noticed.pop(queue, None)
            self._state.order.absent(queue, now, asked_at=now)
        for queue in kept:
            self._state.order.nonempty(queue, now)
        self._state.pull_wake.set()

    async def work(self, stop: asyncio.Event) -> None:
        """Follow plans and keep the engine running until *stop* is set."""
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
        """The model that should be active now, by the operator's order or the plan."""
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
        """Return whether this instance may activate a model that it selects by waiting work."""
        state = self._state
        if state.draining or state.swapping or state.model is None or self._ordered is not None:
            return False
        return self._orphanhood.is_alone()

    async def _adopt(self) -> None:
        """
        Activate a model whose work no instance serves, unless another instance claims the model.
        """
        model = await self._orphanhood.look()
        if model is None:
            return
        async with self._orphanhood.claim(model) as is_ours:
            # A plan or work may have arrived while the broker answered the claim.
            if is_ours and self._may_adopt():
                log.info("model.adopted", model=model, instead_of=self._state.model)
                await self._follow(model)

    def _segments(self) -> tuple[Segment, ...]:
        """Segments of the plan whose models this instance may serve."""
        segments = self._state.plan.queue.segments if self._state.plan is not None else ()
        able = [segment for segment in segments if segment.model in self._servable]
        return tuple(segment for segment in able if segment.model not in self._state.differing)

    async def activate(self, model: ModelName) -> LsoResult:
        """
        Swap to *model* by an operator's order, until a later plan arrives.

        Raises:
            LsoRefusedError: This instance does not serve the model, or is draining.
        """
        self._models.check(model)
        if self._state.draining:
            raise LsoRefusedError("the instance is draining")
        self._ordered = model
        result = await self._swap((Segment(model=model),), reason=ORDERED)
        if not result.ok:
            self._ordered = None
        return result

    async def _follow(self, target: ModelName) -> None:
        """Apply the plan or the operator's order to the instance by the table of QLM §5."""
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
        """
        Swap to the first model of *queue*; after a failure, set the time of the next attempt.

        Without an active model, the next attempt follows after `RESTART_PAUSE_S`.
        """
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
        """Empty the instance and activate the first model of *queue*; return the result."""
        state = self._state
        change = HeadChange(old_head=self._followed[0] if self._followed else None, queue=queue)
        lsos = lso_actions(change, self._observer.situation())
        if reason is not None:
            lsos = tuple(replace(lso, reason=reason) for lso in lsos)
        with state.swap():  # so that no request is admitted from here on
            results = await self._executor.follow(lsos)
        for lso, result in results:
            if isinstance(lso, Activate):
                if result.ok:
                    self._followed = queue
                return result
        failed = [result for _, result in results if not result.ok]
        return failed[-1] if failed else already(f"{queue[0].model} is active")

    async def empty(self, *, drain_s: Seconds) -> None:
        """
        Hand back waiting requests, let runs finish for *drain_s*, and evict the remaining runs.
        """
        left = await self._runs.finish_runs(drain_s)
        if left:
            reason = because(Rule.DRAIN_OVER, drain_s=drain_s)
            await self._executor.run(Evict(request_ids=left, reason=reason))
        await poll_until(lambda: not self._state.runs)

    async def hand_back_window(self) -> None:
        """Return all requests in the window to their queues. The caller has stopped pulling."""
        await self._runs.hand_back_window()

    async def _revive(self, stop: asyncio.Event) -> None:
        """Restart a dead engine, and activate its former model."""
        state = self._state
        state.totals.crashes += 1
        log.error("engine.died", instance_id=state.instance_id, runs=len(state.runs))
        async with self._executor.exclusive():
            with state.swap():
                # Return the waiting requests, so that other instances can serve them if this engine
                # does not restart.
                await self.hand_back_window()
                while not stop.is_set() and not await self._restarted():
                    await pause(stop, RESTART_PAUSE_S)
                if not stop.is_set():
                    await self._reactivate()

    async def _restarted(self) -> bool:
        """Start the engine without a model; return whether it started."""
        try:
            await self._engine.start()
        except EngineError as error:
            log.error("engine.restart_failed", error=str(error))
            return False
        return True

    async def _reactivate(self) -> None:
        """
        Activate the former model of a restarted engine.

        After a failure, the next plan or the operator's next order selects the model.
        """
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
        known = {*state.noticed, *(state.plan.work_queues if state.plan else ())}
        queues = {queue for queue in known if model_of(queue) == state.model}
        if state.plan is not None:
            queues.update(
                quota.lane
                for segment in state.plan.queue.segments
                if segment.model == state.model
                for quota in segment.lanes
            )
        sources = sources_of(state.instance_id, queues, self._layout)
        state.order.set_sources(sources, now)
        state.pull_wake.set()


def _shape(queue: tuple[Segment, ...]) -> tuple[tuple[ModelName, frozenset[str]], ...]:
    """Identity of a virtual queue: its models in order, each with its lanes, without quotas."""
    return tuple(
        (segment.model, frozenset(quota.lane for quota in segment.lanes)) for segment in queue
    )
