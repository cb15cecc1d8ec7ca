"""An instance for which nobody plans: since when, and what it should serve then."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from zlib import crc32

import structlog

from services.agent.state import AgentState
from shared.broker import topology
from shared.broker.protocol import Broker
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.errors import BrokerConflictError, MeshError
from shared.contracts.lanes import model_of
from shared.runtime.attention import PERIOD_S, Attention
from shared.runtime.clock import Clock
from shared.runtime.tasks import pause

log = structlog.get_logger()
LOOK_PERIOD_S = 0.5
LEAST_WAIT_S = 1.0
"""Work that is seen waiting all that time is not being served by anybody."""
WAIT_SPREAD_S = 2.0
"""Instances see the same at the same time: each waits for a part of this longer."""


class Orphanhood:
    """
    Tells when an instance is alone, and which model it should then bring up by itself.

    Time in which it could not have heard of a plan does not count: while its process stood
    still, and while it had no connection. Notices are hints; what counts is work that waits.

    Args:
        state: The agent's.
        broker: Where work waits.
        servable: Base models this instance may serve.
        patience_s: Without a plan and without work for so long, it is alone.
        clock: Wall time.
        stall_clock: Goes on while the process stands still.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        broker: Broker,
        servable: tuple[ModelName, ...],
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
        self._attention: Attention | None = None
        self._busy_at = clock.now()
        self._num_pulled = 0
        self._was_lost = False
        self._look_at: UnixTime = 0.0
        self._waiting: dict[str, UnixTime] = {}
        """Queues of other models that had work at every look, and since when."""
        share = crc32(state.instance_id.encode()) / 2**32
        self._wait_s = LEAST_WAIT_S + share * WAIT_SPREAD_S
        broker.on_connection_lost(self._on_connection_lost)

    async def watch(self, stop: asyncio.Event) -> None:
        """Notice own stalls and lost connections until *stop*."""
        while not stop.is_set():
            self.attend()
            await pause(stop, PERIOD_S)

    def attend(self) -> None:
        """See whether there is work; leave out time in which nothing could be heard."""
        if self._attention is None:  # only now: starting up takes long, and is no stall
            self._attention = Attention(self._stall_clock)
        state, now = self._state, self._clock.now()
        missed_s = self._attention.missed_s()
        if self._was_lost or not self._broker.connected:
            # Leaders may have lost theirs, too: they have all the time again to come back.
            self._was_lost = False
            state.plan_at = self._busy_at = now
            self._waiting.clear()
        elif missed_s:
            state.plan_at = min(now, state.plan_at + missed_s)
            self._busy_at = min(now, self._busy_at + missed_s)
            self._waiting.clear()
        # Short work comes and goes unseen, but is counted.
        if state.runs or state.num_waiting or state.totals.pulled != self._num_pulled:
            self._num_pulled = state.totals.pulled
            self.busy()

    def busy(self) -> None:
        """It has work, or another model since now: it stays as it is for as long as it waits."""
        self._busy_at = self._clock.now()

    def has_plan(self) -> bool:
        """Whether there is a plan that is young enough to be followed."""
        self.attend()
        age_s = self._clock.now() - self._state.plan_at
        return self._state.plan is not None and age_s < self._patience_s

    def is_alone(self) -> bool:
        """Whether neither a plan nor work has come for so long that it should look around."""
        return not self.has_plan() and self._clock.now() - self._busy_at >= self._patience_s

    def noticed_model(self) -> ModelName | None:
        """The servable model that most recently got work: for an instance that has none."""
        recent = sorted(self._state.noticed.items(), key=lambda item: -item[1])
        models = (model_of(queue) for queue, _ in recent)
        return next((model for model in models if model in self._servable), None)

    async def look(self) -> ModelName | None:
        """Count what was noticed; a model whose work has been waiting for long enough."""
        now = self._clock.now()
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_PERIOD_S
        try:
            ready = [queue for queue in self._others() if await self._is_ready(queue)]
        except MeshError as error:
            log.warning("orphan.look_failed", error=str(error))
            ready = []
        # A queue that does not answer the broker in time is counted as empty: that only delays.
        self._waiting = {queue: self._waiting.get(queue, now) for queue in ready}
        due = [(at, queue) for queue, at in self._waiting.items() if now - at >= self._wait_s]
        if not due:
            return None
        self._waiting.clear()  # whatever comes of it: before the next time, it is seen to wait
        return model_of(min(due)[1])

    def _others(self) -> list[str]:
        """Queues of other models that notices told of."""
        others = [model for model in self._servable if model != self._state.model]
        return [queue for queue in self._state.noticed if model_of(queue) in others]

    async def _is_ready(self, queue: str) -> bool:
        depth = await self._broker.depth(queue)
        return depth is not None and depth.ready > 0

    @asynccontextmanager
    async def claim(self, model: ModelName) -> AsyncIterator[bool]:
        """
        Be the only instance that brings *model* up by itself; whether this is the one.

        Others that saw the same work look again afterwards: by then it may be in good hands.
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
            except MeshError as error:  # it ends with the connection, or expires
                log.warning("orphan.claim_failed", model=model, error=str(error))

    def _on_connection_lost(self) -> None:
        self._was_lost = True
