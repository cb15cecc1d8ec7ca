"""
Detects that no leader plans for an instance, and selects the model that the instance serves then.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from zlib import crc32

import structlog

from services.agent.state import AgentState
from shared.broker import topology
from shared.broker.protocol import Broker
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.errors import BrokerConflictError, MeshError
from shared.contracts.lanes import model_of
from shared.runtime.clock import Clock
from shared.runtime.stall_detector import PERIOD_S, StallDetector
from shared.runtime.tasks import pause

log = structlog.get_logger()
LOOK_PERIOD_S = 0.5
LEAST_WAIT_S = 1.0
"""
Minimum time for which work must wait before the instance concludes that no other instance serves
it.
"""
WAIT_SPREAD_S = 2.0
"""
Range of an additional waiting time that differs for each instance, so that instances do not act
simultaneously.
"""


class Orphanhood:
    """
    Detects when an instance has no plan and no work, and selects the model to activate then.

    Time in which the process was stalled or disconnected does not count, since no plan could
    arrive. A notice only names a queue; the instance acts only if the queue still contains waiting
    work.

    Args:
        state: State of the agent.
        broker: Broker with the work queues.
        servable: Base models that this instance may serve.
        patience_s: Time without a plan and without work after which the instance selects a model
            itself.
        clock: Wall time.
        stall_clock: Clock that continues while the process is stalled.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        broker: Broker,
        servable: Collection[ModelName],
        patience_s: Seconds,
        clock: Clock,
        stall_clock: Callable[[], Seconds] = time.time,
    ) -> None:
        self._state = state
        self._broker = broker
        self._servable = servable
        self._patience_s = patience_s
        self._clock = clock
        self._stall_clock = stall_clock
        self._attention: StallDetector | None = None
        self._busy_at = clock.now()
        self._num_pulled = 0
        self._was_lost = False
        self._look_at: UnixTime = 0.0
        self._waiting: dict[str, UnixTime] = {}
        """
        Queue of another model that had work at each check -> time of the first check that found
        work.
        """
        share = crc32(state.instance_id.encode()) / 2**32
        self._wait_s = LEAST_WAIT_S + share * WAIT_SPREAD_S
        broker.on_connection_lost(self._on_connection_lost)

    async def watch(self, stop: asyncio.Event) -> None:
        """Detect stalls of this process and lost broker connections until *stop* is set."""
        while not stop.is_set():
            self.attend()
            await pause(stop, PERIOD_S)

    def attend(self) -> None:
        """
        Update the times of the last plan and the last work, without time in which no message could
        arrive.
        """
        # Created at the first call, so that a long start does not count as a stall.
        if self._attention is None:
            self._attention = StallDetector(self._stall_clock)
        state, now = self._state, self._clock.now()
        missed_s = self._attention.missed_s()
        if self._was_lost or not self._broker.connected:
            # The leader may have lost its connection also: wait the full patience for its plans.
            self._was_lost = False
            state.plan_at = self._busy_at = now
            self._waiting.clear()
        elif missed_s:
            state.plan_at = min(now, state.plan_at + missed_s)
            self._busy_at = min(now, self._busy_at + missed_s)
            self._waiting.clear()
        # Also compare the number of pulled requests, since short work may begin and end between two
        # checks.
        if state.runs or state.num_waiting or state.totals.pulled != self._num_pulled:
            self._num_pulled = state.totals.pulled
            self.busy()

    def busy(self) -> None:
        """Record that the instance has work or a new model; the time `patience_s` starts again."""
        self._busy_at = self._clock.now()

    def has_plan(self) -> bool:
        """Return whether the last plan is recent enough to be followed."""
        self.attend()
        age_s = self._clock.now() - self._state.plan_at
        return self._state.plan is not None and age_s < self._patience_s

    def is_alone(self) -> bool:
        """Return whether no plan and no work has arrived during the last `patience_s` seconds."""
        return not self.has_plan() and self._clock.now() - self._busy_at >= self._patience_s

    def noticed_model(self) -> ModelName | None:
        """
        Return the servable model that got work most recently.

        Used by an instance without an active model.
        """
        recent = sorted(self._state.noticed.items(), key=lambda item: -item[1])
        models = (model_of(queue) for queue, _ in recent)
        return next((model for model in models if model in self._servable), None)

    async def look(self) -> ModelName | None:
        """
        Check the queues that notices named; return a model whose work has waited long enough, if
        any.
        """
        now = self._clock.now()
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_PERIOD_S
        try:
            ready = [queue for queue in self._others() if await self._is_ready(queue)]
        except MeshError as error:
            log.warning("orphan.look_failed", error=str(error))
            ready = []
        # A queue counts as empty if the broker does not return its depth in time; this only delays
        # the detection.
        self._waiting = {queue: self._waiting.get(queue, now) for queue in ready}
        due = [(at, queue) for queue, at in self._waiting.items() if now - at >= self._wait_s]
        if not due:
            return None
        self._waiting.clear()  # the waiting time restarts after each claim, successful or not
        return model_of(min(due)[1])

    def _others(self) -> list[str]:
        """Queues that notices named and whose models are not active."""
        others = [model for model in self._servable if model != self._state.model]
        return [queue for queue in self._state.noticed if model_of(queue) in others]

    async def _is_ready(self, queue: str) -> bool:
        depth = await self._broker.depth(queue)
        return depth is not None and depth.ready > 0

    @asynccontextmanager
    async def claim(self, model: ModelName) -> AsyncIterator[bool]:
        """
        Claim *model*, so that only one instance activates it without a plan.

        Yields whether this instance has the claim. An instance without the claim checks the work
        again later; the claimant may serve it meanwhile.
        """
        spec = topology.claim_queue(model)
        try:
            await self._broker.declare_queue(spec)
        except BrokerConflictError:
            yield False
            return
        except MeshError as error:
            log.warning("orphan.claim_failed", model=model, error=str(error))
            yield False
            return
        try:
            yield True
        finally:
            try:
                await self._broker.delete_queue(spec.name)
            # the broker deletes the claim with the connection or when it expires
            except MeshError as error:
                log.warning("orphan.claim_failed", model=model, error=str(error))

    def _on_connection_lost(self) -> None:
        self._was_lost = True
