"""Pulls requests that can start soon into the window, from the queues of the current segment."""

import asyncio
import contextlib
import math

import structlog

from services.agent.backends.base import EngineBackend
from services.agent.endings import CANCELLED_ERROR, Endings
from services.agent.holding import bounds_now, held_now, may_pull, pull_state
from services.agent.outbox import Outbox
from services.agent.settings import PullSettings
from services.agent.state import AgentState, Pulled
from shared.broker.protocol import Broker, Delivery, Settlement
from shared.contracts.base import Decoder, Seconds, UnixTime
from shared.contracts.errors import ContractError, MeshError, QueueNotFoundError, TransientError
from shared.contracts.lanes import LaneKey
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import PullState
from shared.runtime.clock import Clock
from solver.prediction.latency.latency_model import predict_s
from solver.prediction.latency.service_time import (
    predicted_decode_s,
    predicted_output_tokens,
    predicted_prefill_s,
)
from solver.scheduling.pull_room import Held, PullBounds, has_best_effort_room, has_room, is_loaded
from solver.scheduling.pulling import Source
from solver.scheduling.relegation import BUSY_TOKENS, busy_token_s, is_infeasible

log = structlog.get_logger()
_decode: Decoder[QueuedRequest] = Decoder(QueuedRequest)
BROKER_RETRY_S = 0.5
MIN_SLEEP_S = 0.01
MAX_SLEEP_S = 1.0


class Puller:
    """
    Pulls requests into the window while the bounds allow it.

    Args:
        endings: Handles pulled requests that must not run.
        outbox: Handles messages that are not requests.
        settings: Bounds of the window.
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
        self._bounds = settings.bounds
        self._clock = clock
        broker.on_connection_lost(self._on_connection_lost)

    def _on_connection_lost(self) -> None:
        self._state.totals.connections_lost += 1
        self._state.order.look_again(self._clock.now())

    async def work(self, stop: asyncio.Event) -> None:
        """Pull requests while queues have requests and the bounds allow it, until *stop* is set."""
        while not stop.is_set():
            source = self._next_source()
            if source is None:
                await self._sleep()
                continue
            try:
                await self._pull(source)
            except TransientError as error:
                log.warning("pull.failed", queue=source.queue, error=str(error))
                await asyncio.sleep(BROKER_RETRY_S)
            # The error affects one queue: pulls from other queues continue.
            except MeshError as error:
                log.error("pull.failed", queue=source.queue, error=str(error))
                now = self._clock.now()
                self._state.order.absent(source.queue, now, asked_at=now)

    async def pull_now(self, count: int) -> int:
        """
        Pull up to *count* requests within the bounds.

        Queues that were recently empty are checked again.

        Returns:
            Number of requests pulled.

        Raises:
            TransientError: The broker is unavailable.
        """
        now = self._clock.now()
        for queue in self._state.order.queues:
            self._state.order.nonempty(queue, now)
        pulled = 0
        while pulled < count and (source := self._next_source()) is not None:
            pulled += await self._pull(source)
        return pulled

    def room(self) -> PullState:
        """Pulled work, the bounds of pulled work, and whether one more request may be pulled."""
        return pull_state(self._state, self._engine.snapshot(), self._bounds)

    async def _pull(self, source: Source) -> bool:
        """Pull the first request of *source*; return whether *source* had a request."""
        self._state.pulls[source.queue] += 1
        try:
            delivery = await self._head(source.queue)
            if delivery is not None:
                await self._taken(delivery, source)
        finally:
            self._state.pulls[source.queue] -= 1
        return delivery is not None

    async def _taken(self, delivery: Delivery, source: Source) -> None:
        """Process *delivery*; if processing fails, return *delivery* to its queue."""
        try:
            await self._take(delivery, source)
        except MeshError:
            await delivery.settle(Settlement.REQUEUE)
            raise

    async def _head(self, queue: str) -> Delivery | None:
        asked_at = self._clock.now()
        try:
            delivery = await self._broker.get(queue)
        except QueueNotFoundError:
            self._state.order.absent(queue, self._clock.now(), asked_at=asked_at)
            return None
        if delivery is None:
            self._state.order.empty(queue, self._clock.now())
        return delivery

    async def _sleep(self) -> None:
        self._state.pull_wake.clear()
        timeout_s = min(MAX_SLEEP_S, max(MIN_SLEEP_S, self._asked_at() - self._clock.now()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._state.pull_wake.wait(), timeout_s)

    def _asked_at(self) -> UnixTime:
        """Time of the next pull; setting `pull_wake` makes the pull earlier."""
        if not may_pull(self._state):
            return self._state.order.inbox_at()
        held, bounds = self._room()
        if not has_room(held, bounds):
            return math.inf
        best_effort_room = has_best_effort_room(held, bounds)
        return self._state.order.wake_at(self._clock.now(), best_effort_room=best_effort_room)

    def _next_source(self) -> Source | None:
        if not may_pull(self._state):
            # The inbox holds requests that only this instance reads, so pull them; `_take` returns
            # them to their lanes.
            return self._state.order.inbox(self._clock.now())
        held, bounds = self._room()
        if not has_room(held, bounds):
            return None
        best_effort_room = has_best_effort_room(held, bounds)
        return self._state.order.next(self._clock.now(), best_effort_room=best_effort_room)

    def _room(self) -> tuple[Held, PullBounds]:
        """Pulled work that has not begun, and the current bounds of pulled work."""
        engine = self._engine.snapshot()
        return held_now(self._state, engine, self._bounds), bounds_now(engine, self._bounds)

    async def _take(self, delivery: Delivery, source: Source) -> None:
        now = self._clock.now()
        try:
            request = _decode(delivery.body)
            LaneKey.parse(request.lane)  # the request may have to return to this lane
        except ContractError as error:
            await self._outbox.dead_letter_undecodable(delivery, f"undecodable: {error}", now=now)
            return
        state = self._state
        work_tokens = request.prompt_tokens + predicted_output_tokens(request, state.profile)
        state.order.pulled(source.queue, request.deadline_at, work_tokens)
        pulled = Pulled(request=request, deliveries=[delivery], pulled_at=now)
        if (known := state.find(request.request_id)) is not None:
            await self._join(known, pulled, now)
            return
        state.totals.pull(source.queue, request.grouped_at)
        if (request.request_id, request.reply_to) in state.cancelled:
            await self._endings.fail(pulled, CANCELLED_ERROR, dead_letter=False)
        elif request.model.base != state.model or not may_pull(state):
            await self._endings.hand_back(pulled)
        elif self._is_infeasible(request, now):
            await self._endings.relegate(pulled)
        else:
            state.hold(pulled)

    async def _join(self, known: Pulled, pulled: Pulled, now: UnixTime) -> None:
        """
        Merge a pulled message into the held request with the same id.

        A newer copy replaces a held request that has not run on this instance. If the held request
        has run here, the newer copy is handed back. A message with the same id from another
        producer is always handed back.
        """
        old, new = known.request, pulled.request
        same = (old.tenant, old.reply_to) == (new.tenant, new.reply_to)
        if same and new.attempts.hop <= old.attempts.hop:
            # The message was redelivered after a lost connection, or is a second copy.
            known.deliveries += pulled.deliveries
        elif same and self._state.only_waits(known):
            self._state.release(old.request_id)
            known.request, known.deliveries = new, known.deliveries + pulled.deliveries
            self._state.hold(known)
        else:
            # A request of another producer, or a newer copy of a running request, returns to its
            # resume queue. Dropping the newer copy could lose the request: the producer may stop
            # the older run as superseded.
            resume = LaneKey.parse(new.lane).resume_name
            self._state.order.hold(resume, now + self._settings.evict_hold_s)
            await self._endings.hand_back(pulled)

    def _is_infeasible(self, request: QueuedRequest, now: float) -> bool:
        profile = self._state.profile
        decode_s = predicted_decode_s(request, profile)
        if is_loaded(self._room()[0], self._bounds):
            decode_s = max(decode_s, self._busy_decode_s(request))
        return is_infeasible(
            request,
            now=now,
            prefill_s=predicted_prefill_s(request, profile),
            decode_s=decode_s,
        )

    def _busy_decode_s(self, request: QueuedRequest) -> Seconds:
        """Predicted time from first to last token of a request on a loaded instance."""
        profile = self._state.profile
        if profile is None or profile.latency is None:
            return 0.0
        tokens = predicted_output_tokens(request, profile) - request.progress.num_tokens
        one_s = predict_s(profile.latency, compute_tokens=BUSY_TOKENS, context_tokens=0)
        return max(0.0, tokens) * busy_token_s(predicted_s=one_s, pace_s=self._state.pace_s)
