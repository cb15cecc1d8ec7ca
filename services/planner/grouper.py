"""The grouper: validate, admit, classify, publish with confirm, acknowledge."""

import asyncio
import secrets
from dataclasses import replace

import msgspec
import structlog

from services.planner.admission import check_admission
from services.planner.intake import Intake, request_id_of
from services.planner.queued import queued_message
from services.planner.refusals import bury, error_info, send_failure
from services.planner.routing import Routing
from services.planner.settings import GrouperSettings
from services.planner.state import GrouperState, identity
from shared.broker import topology
from shared.broker.notices import tell_nonempty
from shared.broker.protocol import Broker, Delivery, OutMessage, PublishOutcome, Settlement
from shared.broker.retry import publish_until_confirmed
from shared.contracts.base import encode
from shared.contracts.errors import CapacityError, ContractError, MeshError, TransientError
from shared.contracts.estimates import Profile
from shared.contracts.lanes import LaneKey, LaneLayout, inbox_name, work_version_of
from shared.contracts.plans import LanesForecast
from shared.contracts.requests import QueuedRequest
from shared.contracts.telemetry import LanesObserved, RequestObserved
from shared.runtime.clock import Clock
from solver.scheduling.window import tokens_needed

log = structlog.get_logger()
NOTICE_SPACING_S = 0.01
OUTSTANDING_MEMORY_S = 6 * 3600.0
"""After so long a request is no longer counted as its tenant's: its end may have gone unheard."""


class Grouper:
    """
    Takes requests from the global queues into lanes. Any number compete.

    Args:
        broker: Its connection.
        intake: Validation and classification.
        settings: Limits and shares.
        state: Soft state, reported each second.
        clock: Wall time.
        sender: Name of this grouper in its reports.
        routing: Chooses instances; none leaves all requests to be pulled.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        intake: Intake,
        settings: GrouperSettings,
        state: GrouperState,
        clock: Clock,
        sender: str,
        routing: Routing | None = None,
    ) -> None:
        self._routing = routing
        self._broker = broker
        self._intake = intake
        self._own_layout = intake.layout
        self._settings = settings
        self.state = state
        self._clock = clock
        self._sender = sender
        self._incarnation = secrets.token_hex(6)
        self._noticed_at: dict[str, float] = {}
        self._owed_notices: set[str] = set()
        self._declaring = asyncio.Lock()
        self._under_way: dict[str, asyncio.Event] = {}

    async def on_request(self, delivery: Delivery) -> None:
        """Handle one message of a global queue and settle it."""
        try:
            await self._take_or_refuse(delivery)
        except TransientError as error:
            log.warning("request.deferred", error=str(error))
            await delivery.settle(Settlement.REQUEUE)
        except Exception:  # any bug ends this request only: buried, its obituary tells the producer
            log.exception("request.broken")
            await delivery.settle(Settlement.REJECT)

    async def _take_or_refuse(self, delivery: Delivery) -> None:
        try:
            await self._take(delivery)
        except (ContractError, CapacityError) as error:
            await self._refuse(delivery, error)

    async def _take(self, delivery: Delivery) -> None:
        request = self._intake.accept(delivery, self._clock.now())
        # A copy may be acknowledged only once the other is safe in its lane.
        key = identity(request.tenant, request.request_id)
        while (other := self._under_way.get(key)) is not None:
            await other.wait()
        if key in self.state.recent:
            log.info("request.repeated", request_id=request.request_id)
            await delivery.settle(Settlement.ACK)
            return
        done = self._under_way[key] = asyncio.Event()
        try:
            queue = await self._put(request)
            self.state.recent.add(key)
        finally:
            del self._under_way[key]
            done.set()
        await delivery.settle(Settlement.ACK)
        await self._notify(queue)

    async def _put(self, request: QueuedRequest) -> str:
        """Publish an admitted request and count it; the queue that it is in now."""
        now, tokens = self._clock.now(), tokens_needed(request)
        check_admission(request, self.state, self._settings, now)
        if self._routing is not None:
            request = self._routing.stamped(request)
        # Decided once, as it comes: what its tenant sends later is no reason to put it back.
        above_share = self.state.shares.above_share(request.tenant, tokens)
        # Before anything is waited for: a burst must see itself, and an end must find its request.
        is_new = self.state.admit(request.request_id, request.tenant, tokens, at=now)
        try:
            queue = await (self._overflowed(request) if above_share else self._placed(request))
        except BaseException:  # cancelled, too: nobody else will take it back
            if is_new:
                self.state.finish(request.request_id, request.tenant)
            raise
        work = self._intake.work.tokens(request)
        self.state.count(request, queue=queue, work_tokens=work, at=self._clock.now())
        return queue

    async def _placed(self, request: QueuedRequest) -> str:
        return await self._routed(request) or await self._laned(request)

    async def _routed(self, request: QueuedRequest) -> str | None:
        """Publish to the inbox of the instance that was chosen; None when there is none."""
        if self._routing is None:
            return None
        try:
            instance_id = await self._routing.place(request)
        except TransientError:
            raise
        except Exception:  # any bug in there costs the request its turn only: lanes do without
            log.exception("routing.broken", request_id=request.request_id)
            return None
        if instance_id is None:
            return None
        inbox, message = inbox_name(instance_id), queued_message(request)
        outcome = await publish_until_confirmed(self._broker, topology.LANES, inbox, message)
        if outcome is not PublishOutcome.CONFIRMED:
            log.info("inbox.closed", instance_id=instance_id, request_id=request.request_id)
            return None
        return inbox

    async def _laned(self, request: QueuedRequest) -> str:
        queue = LaneKey.parse(request.lane).queue_name
        foretold = self.state.wait_forecast(request, self._clock.now())
        with self.state.entry(request.lane):
            await self._publish(queue, msgspec.structs.replace(request, foretold=foretold))
        return queue

    async def _overflowed(self, request: QueuedRequest) -> str:
        """Publish beside its lane; what is above its tenant's share is not routed either."""
        queue = LaneKey.parse(request.lane).overflow_name
        await self._publish(queue, request)
        return queue

    async def _publish(self, queue: str, request: QueuedRequest) -> None:
        if queue not in self.state.declared:
            await self._declare(queue)
        message = queued_message(request)
        outcome = await publish_until_confirmed(self._broker, topology.LANES, queue, message)
        if outcome is PublishOutcome.UNROUTABLE:
            await self._declare(queue)
            outcome = await publish_until_confirmed(self._broker, topology.LANES, queue, message)
        if outcome is not PublishOutcome.CONFIRMED:
            raise TransientError(f"lane {queue} took nothing: {outcome.value}")

    async def _declare(self, queue: str) -> None:
        # A lane of edges that were replaced is being emptied, to be deleted.
        if work_version_of(queue) not in (0, self._intake.layout.work_version):
            raise TransientError(f"lane {queue} is closed: work is classified anew")
        async with self._declaring:
            await topology.declare_work_queue(self._broker, queue)
            self.state.declared.add(queue)

    async def _notify(self, queue: str) -> None:
        """Tell agents to look, at most once per spacing; the last notice is never dropped."""
        now = self._clock.now()
        if now - self._noticed_at.get(queue, 0.0) < NOTICE_SPACING_S:
            self._owed_notices.add(queue)
            return
        await self._notice(queue, now)

    async def _notice(self, queue: str, now: float) -> None:
        self._noticed_at[queue] = now
        self._owed_notices.discard(queue)
        await tell_nonempty(self._broker, queue)

    async def send_owed_notices(self) -> None:
        """Send the notices that spacing held back."""
        now = self._clock.now()
        for queue in tuple(self._owed_notices):
            await self._notice(queue, now)

    async def _refuse(self, delivery: Delivery, error: MeshError) -> None:
        info = error_info(error)
        request_id = request_id_of(delivery)
        log.info("request.refused", request_id=request_id, code=info.code, param=info.param)
        self.state.refused += 1
        await send_failure(
            self._broker,
            reply_to=delivery.reply_to,
            request_id=request_id,
            error=info,
            now=self._clock.now(),
        )
        await bury(self._broker, delivery, reason=f"{info.code}: {info.message}")
        await delivery.settle(Settlement.ACK)

    def on_layout(self, layout: LaneLayout) -> None:
        """Classify by *layout* from now on, if it is a later version of our own."""
        mine = self._intake.layout
        if layout.version != mine.version or layout.work_version <= mine.work_version:
            return
        self._classify_by(layout)
        log.info("layout.adopted", work_version=layout.work_version, edges=layout.work_edges)

    def forget_layout(self) -> None:
        """The connection went: until it is heard again, nobody knows which edges are in force."""
        self._classify_by(self._own_layout)

    def _classify_by(self, layout: LaneLayout) -> None:
        self._intake = replace(self._intake, layout=layout)
        self.state.keep_lanes(layout.work_version)

    @property
    def routing(self) -> Routing | None:
        """What chooses instances, if anything does."""
        return self._routing

    def on_ended(self, observed: RequestObserved) -> None:
        """A request ended somewhere: its tenant holds less, and its prompt was counted."""
        if self._routing is not None:
            self._routing.on_ended(observed)
        self.state.finish(observed.request_id, observed.tenant)
        self._intake.learn(observed)

    def on_profile(self, profile: Profile) -> None:
        """What the estimator has learnt of an engine, and of its model's answers."""
        self._intake.work.learn(profile)
        if self._routing is not None:
            self._routing.on_profile(profile)

    def on_forecast(self, forecast: LanesForecast) -> None:
        """Take in what the leader expects of lanes."""
        self.state.on_forecast(forecast, self._clock.now())

    async def report(self) -> None:
        """Publish lane totals."""
        self.state.forget_unheard(self._clock.now() - OUTSTANDING_MEMORY_S)
        self.state.seq += 1
        observed = LanesObserved(
            sender=self._sender,
            incarnation=self._incarnation,
            seq=self.state.seq,
            at=self._clock.now(),
            layout=self._intake.layout.version,
            lanes=tuple(counter.total(lane) for lane, counter in self.state.lanes.items()),
            work=self.state.work_totals(),
            work_version=self._intake.layout.work_version,
            work_edges=self._intake.layout.work_edges,
            admitted=self.state.admitted,
            refused=self.state.refused,
        )
        await self._broker.send(
            topology.TELEMETRY,
            topology.LANES_KEY,
            OutMessage(body=encode(observed), kind="lanes.observed.v1", persistent=False),
        )
