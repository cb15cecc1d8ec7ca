"""Late pulls: from the current segment's queues into the window, no more than soon can start."""

import asyncio
import contextlib
import math

import structlog

from services.agent.backends.base import EngineBackend
from services.agent.endings import CANCELLED_ERROR, Endings
from services.agent.outbox import Outbox
from services.agent.settings import PullSettings
from services.agent.state import AgentState, Pulled
from shared.broker.protocol import Broker, Delivery
from shared.contracts.base import Decoder
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.lanes import LaneKey
from shared.contracts.requests import QueuedRequest
from shared.runtime.clock import Clock
from solver.prediction.service_time import (
    predicted_decode_s,
    predicted_prefill_s,
    tokens_s,
)
from solver.scheduling.keys import Tier, tier_of
from solver.scheduling.pulling import Source
from solver.scheduling.relegation import is_hopeless
from solver.scheduling.window import tokens_needed

log = structlog.get_logger()
_decode: Decoder[QueuedRequest] = Decoder(QueuedRequest)
BROKER_RETRY_S = 0.5
MIN_SLEEP_S = 0.01
MAX_SLEEP_S = 1.0


class Puller:
    """
    Keeps the window filled.

    Args:
        state: The agent's.
        broker: Where lanes are.
        engine: Whose room decides.
        endings: For what is not to run.
        outbox: For what is no request.
        settings: Bounds.
        clock: Wall time.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        broker: Broker,
        engine: EngineBackend,
        endings: Endings,
        outbox: Outbox,
        settings: PullSettings,
        clock: Clock,
    ) -> None:
        self._state = state
        self._broker = broker
        self._engine = engine
        self._endings = endings
        self._outbox = outbox
        self._settings = settings
        self._clock = clock

    async def work(self, stop: asyncio.Event) -> None:
        """Pull while there is room and something to pull, until *stop*."""
        while not stop.is_set():
            source = self._next_source()
            if source is None:
                await self._sleep()
                continue
            self._state.pulling += 1
            try:
                delivery = await self._broker.get(source.queue)
                if delivery is None:
                    self._state.order.empty(source.queue, self._clock.now())
                else:
                    await self._take(delivery, source)
            except TransientError as error:
                log.warning("pull.failed", queue=source.queue, error=str(error))
                await asyncio.sleep(BROKER_RETRY_S)
            finally:
                self._state.pulling -= 1

    async def _sleep(self) -> None:
        self._state.pull_wake.clear()
        # Without room nothing is asked until something leaves, which sets the event.
        asked_at = self._state.order.wake_at() if self._has_room() else math.inf
        timeout_s = min(MAX_SLEEP_S, max(MIN_SLEEP_S, asked_at - self._clock.now()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state.pull_wake.wait(), timeout_s)

    def _next_source(self) -> Source | None:
        state = self._state
        if state.draining or state.swapping or state.model is None or not self._has_room():
            return None
        return state.order.next(self._clock.now(), best_effort_room=self._has_best_effort_room())

    def _has_room(self) -> bool:
        """Room for one more: bounded in requests and in seconds of the work that goes first."""
        return self._held < self._settings.window and self._starts_soon(
            sum(
                tokens_needed(request)
                for request in self._state.window
                if tier_of(request) is Tier.REACHABLE
            )
        )

    def _has_best_effort_room(self) -> bool:
        window = self._state.window
        held = window.count(Tier.BEST_EFFORT) + window.count(Tier.RELEGATED) + self._state.pulling
        return held < self._settings.best_effort_window and self._starts_soon(window.tokens)

    @property
    def _held(self) -> int:
        return len(self._state.window) + self._state.pulling

    def _starts_soon(self, tokens_before: int) -> bool:
        """Whether one more would start at once, or after *tokens_before* that are not too many."""
        state = self._state
        if len(state.runs) + self._held < self._engine.snapshot().max_running:
            return True
        return tokens_s(tokens_before, state.profile) < self._settings.max_backlog_s

    async def _take(self, delivery: Delivery, source: Source) -> None:
        now = self._clock.now()
        try:
            request = _decode(delivery.body)
            LaneKey.parse(request.lane)  # it may have to go back there
        except ContractError as error:
            await self._outbox.bury_undecodable(delivery, f"undecodable: {error}", now=now)
            return
        state = self._state
        state.order.pulled(source.queue, request.deadline_at)
        pulled = Pulled(request=request, deliveries=[delivery], pulled_at=now)
        if (known := state.find(request.request_id)) is not None:
            if (known.request.tenant, known.request.reply_to) != (request.tenant, request.reply_to):
                # Another producer's request under the same id: it has to wait its turn.
                resume = LaneKey.parse(request.lane).resume_name
                state.order.hold(resume, now + self._settings.evict_hold_s)
                await self._endings.hand_back(pulled)
                return
            # Redelivered after a lost connection, or a second copy: what runs here serves both.
            known.deliveries.append(delivery)
            return
        state.totals.pulled += 1
        state.totals.by_lane[source.queue] = state.totals.by_lane.get(source.queue, 0) + 1
        state.totals.pulled_to[source.queue] = request.grouped_at
        if (request.request_id, request.reply_to) in state.cancelled:
            await self._endings.fail(pulled, CANCELLED_ERROR, bury=False)
        elif request.model.base != state.model or state.swapping or state.draining:
            await self._endings.hand_back(pulled)
        elif self._hopeless(request, now):
            await self._endings.relegate(pulled)
        else:
            state.hold(pulled)

    def _hopeless(self, request: QueuedRequest, now: float) -> bool:
        profile = self._state.profile
        return is_hopeless(
            request,
            now=now,
            prefill_s=predicted_prefill_s(request, profile),
            decode_s=predicted_decode_s(request, profile),
        )
