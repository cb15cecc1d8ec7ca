"""Which model is active: following the plan, swapping, and bringing a dead engine back."""

import asyncio
import contextlib

import structlog

from services.agent.admission import end_run
from services.agent.backends.base import EngineBackend
from services.agent.endings import Endings
from services.agent.reporting import Reporter
from services.agent.state import AgentState, Ending
from shared.contracts.base import ModelName, Seconds
from shared.contracts.errors import ContractError, EngineError
from shared.contracts.lanes import LaneKey, LaneLayout, inbox_name, model_of, relegated_name
from shared.contracts.plans import PlanPublished
from shared.contracts.telemetry import ModelActivated, Residency
from shared.runtime.clock import Clock
from shared.runtime.tasks import pause, poll_until
from solver.planning.lanes import band_lower_edge_s
from solver.scheduling.pulling import Source, SourceKind

log = structlog.get_logger()
CHECK_PERIOD_S = 0.2
RESTART_PAUSE_S = 1.0
NOTICE_MEMORY_S = 300.0


class ModelResidency:
    """
    Follows the plan's first segment; without a plan, whatever work notices tell of.

    Args:
        state: The agent's; this class alone writes `model` and `swapping`.
        engine: The backend.
        endings: For what must leave before a swap.
        reporter: Told of swaps.
        layout: For the deadlines of lanes.
        servable: Base models this instance may serve.
        swap_drain_s: Time for running requests before they are evicted for a swap.
        orphan_patience_s: Age from which a plan is no longer waited for.
        clock: Wall time.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        engine: EngineBackend,
        endings: Endings,
        reporter: Reporter,
        layout: LaneLayout,
        servable: tuple[ModelName, ...],
        swap_drain_s: Seconds,
        orphan_patience_s: Seconds,
        clock: Clock,
    ) -> None:
        self._state = state
        self._engine = engine
        self._endings = endings
        self._reporter = reporter
        self._layout = layout
        self._servable = servable
        self._swap_drain_s = swap_drain_s
        self._orphan_patience_s = orphan_patience_s
        self._clock = clock
        self._busy_at = clock.now()
        self._changed = asyncio.Event()

    def plan_changed(self, plan: PlanPublished) -> None:
        """Take in a plan; lower epochs are ignored, so a thawed old leader changes nothing."""
        if self._state.plan is not None and plan.epoch < self._state.plan.epoch:
            return
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
        if self._state.order.nonempty(queue, now):
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
            if target is not None and target != self._state.model and not self._state.draining:
                await self._swap(target)
            self._set_sources()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), CHECK_PERIOD_S)

    def _target(self) -> ModelName | None:
        """The model that should be active now."""
        state, now = self._state, self._clock.now()
        if state.runs or len(state.window):
            self._busy_at = now
        plan = state.plan
        fresh = plan is not None and now - state.plan_at < self._orphan_patience_s
        if plan is not None and fresh:
            segments = [s for s in plan.queue.segments if s.model in self._servable]
            return segments[0].model if segments else state.model
        patience_s = 0.0 if state.model is None else self._orphan_patience_s
        if now - self._busy_at < patience_s:
            return state.model
        return self._noticed_model() or state.model

    def _noticed_model(self) -> ModelName | None:
        """The servable model that most recently got work, for want of a plan."""
        recent = sorted(self._state.noticed.items(), key=lambda item: -item[1])
        for queue, _ in recent:
            model = model_of(queue)
            if model in self._servable:
                return model
        return None

    async def _swap(self, model: ModelName) -> None:
        """Empty the instance, then activate *model*."""
        state = self._state
        state.swapping = True
        source = self._residency_of(model)
        log.info("lso.started", kind="swap_model", model=model, source=source.value)
        try:
            await self.empty(drain_s=self._swap_drain_s if state.model else 0.0)
            duration_s = await self._engine.activate(model)
        except EngineError as error:
            log.error("lso.failed", kind="swap_model", model=model, error=str(error))
            state.model = self._engine.snapshot().model
            await asyncio.sleep(RESTART_PAUSE_S)
            return
        finally:
            state.swapping = False
        if state.model is not None:
            state.totals.swaps += 1
        state.model = model
        log.info("lso.completed", kind="swap_model", model=model, duration_s=round(duration_s, 3))
        await self._reporter.activated(
            ModelActivated(
                instance_id=state.instance_id,
                model=model,
                source=source,
                duration_s=duration_s,
                at=self._clock.now(),
            )
        )
        state.wake()

    async def empty(self, *, drain_s: Seconds) -> None:
        """Hand back the window, let runs finish for *drain_s*, evict the rest."""
        state = self._state
        await self.hand_back_window()
        await poll_until(lambda: not state.runs, timeout_s=drain_s)
        for run in tuple(state.runs.values()):
            end_run(state, self._engine, run, Ending.EVICTED)
        await poll_until(lambda: not state.runs)

    async def hand_back_window(self) -> None:
        """Return what was pulled and does not run. Pulling must have been stopped."""
        state = self._state
        await poll_until(lambda: state.pulling == 0)
        for request in tuple(state.window):
            pulled = state.release(request.request_id)
            if pulled is not None:
                await self._endings.hand_back(pulled)

    async def _revive(self, stop: asyncio.Event) -> None:
        """Bring a dead engine up again with the model that it had."""
        state = self._state
        state.totals.crashes += 1
        log.error("engine.died", instance_id=state.instance_id, runs=len(state.runs))
        model, state.swapping = state.model, True
        try:
            # Another instance may serve them meanwhile, and this one may never come back.
            await self.hand_back_window()
            while not stop.is_set():
                try:
                    await self._engine.start()
                    if model is not None:
                        await self._engine.activate(model)
                except EngineError as error:
                    log.error("engine.restart_failed", error=str(error))
                    await pause(stop, RESTART_PAUSE_S)
                else:
                    log.info("engine.restarted", model=model)
                    break
        finally:
            state.swapping = False
            state.wake()

    def _residency_of(self, model: ModelName) -> Residency:
        for entry in self._engine.snapshot().models:
            if entry.model == model:
                return entry.residency
        return Residency.COLD

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
        state.order.set_sources(self._sources(lanes, state.model), now)
        state.pull_wake.set()

    def _sources(self, lanes: set[str], model: ModelName) -> list[Source]:
        """Lanes with all their companions; every queue once."""
        keys = {LaneKey.parse(lane) for lane in lanes if lane.startswith(("lane.", "overflow."))}
        inbox = inbox_name(self._state.instance_id)
        sources = {inbox: Source(queue=inbox, kind=SourceKind.INBOX, time_left_s=0.0)}
        for key in sorted(keys):
            time_left_s = band_lower_edge_s(key.band, self._layout)
            for queue, kind in (
                (key.resume_name, SourceKind.RESUME),
                (key.queue_name, SourceKind.LANE),
                (key.overflow_name, SourceKind.OVERFLOW),
            ):
                sources[queue] = Source(
                    queue=queue,
                    kind=kind,
                    time_left_s=time_left_s,
                    behind=key.queue_name if kind is SourceKind.OVERFLOW else None,
                )
        for queue in lanes:
            if queue.startswith("resume."):
                band = int(queue.rpartition(".")[2])
                time_left_s = band_lower_edge_s(band, self._layout)
                sources[queue] = Source(
                    queue=queue, kind=SourceKind.RESUME, time_left_s=time_left_s
                )
        name = relegated_name(model)
        sources[name] = Source(queue=name, kind=SourceKind.RELEGATED, time_left_s=0.0)
        return list(sources.values())
