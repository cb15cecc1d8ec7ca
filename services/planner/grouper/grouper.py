"""
The grouper: validates, admits and classifies requests, publishes them to lanes, and acknowledges
them.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

import msgspec
import structlog

from services.planner.grouper.admission import check_admission
from services.planner.grouper.expiry import Expiry
from services.planner.grouper.identities import request_id_of
from services.planner.grouper.intake import Intake
from services.planner.grouper.lane_reports import LaneReports
from services.planner.grouper.placement import Placement, check_end, held_for_s, hold
from services.planner.grouper.refusals import dead_letter_refused, error_info
from services.planner.grouper.stored.claims import RETRY_S as CLAIM_RETRY_S
from services.planner.grouper.stored.claims import Claims, IdConflictError
from services.planner.grouper.stored.replies import REFUSAL_HEADER
from services.planner.grouper.tenants import TenantGate
from services.planner.settings import GrouperSettings
from services.planner.state import GrouperState, identity
from shared.broker import topology
from shared.broker.consumer import before_requeue
from shared.broker.finals import publish_final, stored_for
from shared.broker.protocol import Broker, Delivery, Settlement
from shared.contracts.base import Decoder, RequestId, Seconds, TenantId
from shared.contracts.ends import DEADLINE_EXPIRED
from shared.contracts.errors import (
    BrokerConflictError,
    CapacityError,
    ContractError,
    MeshError,
    ModelNotReadyError,
    StoreFullError,
    StoreUnavailableError,
    TransientError,
)
from shared.contracts.estimates import Profile
from shared.contracts.plans import LanesForecast
from shared.contracts.requests import Final, QueuedRequest, RequestFailed, StoredWork
from shared.contracts.stories.story import Story, ended, story_of
from shared.contracts.telemetry import RequestObserved
from shared.contracts.tenants.policies import RateLimitedError
from shared.runtime.clock import Clock
from shared.store.requests.records import Claim, ClaimOutcome
from shared.tracing.grouping import note_placed, note_refused
from solver.planning.forecast import LATE_PROBABILITY, late_with
from solver.scheduling.window import tokens_needed

log = structlog.get_logger()
_decode_queued: Decoder[QueuedRequest] = Decoder(QueuedRequest)
_decode_final: Decoder[Final] = Decoder(Final)
UNKNOWN_MODEL_PERIOD_S: Seconds = 0.1
"""Time between two attempts to find the model of a request in the registry."""
OUTSTANDING_MEMORY_S = 6 * 3600.0
"""
Time after admission at which a request counts as ended for its tenant's share.

The limit is needed because the message about the end of a request may be lost.
"""


class Grouper:
    """
    Moves requests from the global queues to lanes. Several groupers can run concurrently.

    Args:
        intake: Validates and classifies requests.
        settings: Limits and shares.
        state: State of the grouper.
        placement: Puts requests into queues.
        expiry: Ends requests at their ends.
        tenants: Admits requests within the limits of their tenants.
        claims: Claims ids of requests in the store.
        reports: Reports to leaders.
    """

    def __init__(
        self,
        *,
        broker: Broker,
        intake: Intake,
        settings: GrouperSettings,
        state: GrouperState,
        clock: Clock,
        placement: Placement,
        expiry: Expiry,
        tenants: TenantGate,
        claims: Claims,
        reports: LaneReports,
    ) -> None:
        self.placement = placement
        self.routing = placement.routing
        """Chooses an instance for each request; None if instances pull all requests."""
        self.expiry = expiry
        self.tenants = tenants
        self.reports = reports
        self._claims = claims
        self._broker = broker
        self._intake = intake
        self._settings = settings
        self.state = state
        self._clock = clock
        self._under_way: dict[str, asyncio.Event] = {}
        self._num_waiting = 0
        """Number of requests that wait for their model."""

    async def on_request(self, delivery: Delivery) -> None:
        """Process one message of a global queue and settle it."""
        await self._settled(delivery, self._take)

    async def on_held(self, delivery: Delivery) -> None:
        """Process one message that comes from a delay queue, and settle it."""
        await self._settled(delivery, self._take_held)

    async def _settled(
        self, delivery: Delivery, take: Callable[[Delivery], Awaitable[None]]
    ) -> None:
        try:
            await self._taken_or_refused(delivery, take)
        except TransientError as error:
            log.warning("request.deferred", error=str(error))
            await before_requeue(delivery)
            await delivery.settle(Settlement.REQUEUE)
        except (
            Exception
        ):  # a bug ends this request only: its dead-letter reply reaches the producer
            log.exception("request.broken")
            await delivery.settle(Settlement.REJECT)

    async def _taken_or_refused(
        self, delivery: Delivery, take: Callable[[Delivery], Awaitable[None]]
    ) -> None:
        try:
            await take(delivery)
        except (ContractError, CapacityError) as error:
            await self._refuse(delivery, error)
        except BrokerConflictError as error:  # no later attempt succeeds: the operator must act
            log.error("request.refused", error=str(error))
            await self._refuse(delivery, error)

    async def _take(self, delivery: Delivery) -> None:
        request = await self._accepted(delivery)
        if request.stored is not None:
            await self._take_stored(delivery, request, request.stored)
        else:
            await self._once(delivery, request, identity(request.tenant, request.request_id))

    async def _take_held(self, delivery: Delivery) -> None:
        """
        Group a request whose time has come, or hold it for the rest of its time.

        Raises:
            ContractError: The message is not a request, or its model was removed.
        """
        request, now = _decode_queued(delivery.body), self._clock.now()
        if left_s := held_for_s(request, now):
            await hold(self._broker, request, left_s)
            await delivery.settle(Settlement.ACK)
            return
        request = self._intake.regrouped(request, now)
        if request.stored is not None and not request.stored.claimed:
            await self._take_stored(delivery, request, request.stored)
            return
        # It was remembered as a request when it was held first.
        key = f"{identity(request.tenant, request.request_id)}\0released"
        await self._once(delivery, request, key)

    async def _once(self, delivery: Delivery, request: QueuedRequest, key: str) -> None:
        """Put *request* into a queue, unless *key* was put into one before; settle the delivery."""
        async with self._turn(key):
            if key in self.state.recent:
                log.info("request.repeated", request_id=request.request_id)
            else:
                await self._put_or_hold(request)
                self.state.recent[key] = None
        await delivery.settle(Settlement.ACK)

    @asynccontextmanager
    async def _turn(self, key: str) -> AsyncIterator[None]:
        """
        Context in which no other message with *key* is processed: a duplicate may be acknowledged
        only after the broker has confirmed the first request in its lane.
        """
        while (other := self._under_way.get(key)) is not None:
            await other.wait()
        done = self._under_way[key] = asyncio.Event()
        try:
            yield
        finally:
            del self._under_way[key]
            done.set()

    async def _take_stored(
        self, delivery: Delivery, request: QueuedRequest, stored: StoredWork
    ) -> None:
        """
        Put a request whose id means something into a queue, unless it is or was in one; settle the
        delivery. Without the store, the message is held and comes back.

        Raises:
            ContractError: Something else was asked under this id.
            CapacityError: The disk of the store is full.
        """
        async with self._turn(identity(request.tenant, request.request_id)):
            try:
                claim = await self._claims.claim(request, stored)
            except StoreFullError as error:
                # Waiting would not help: the operator must make room.
                raise CapacityError(
                    f"the id cannot be claimed: {error}",
                    retry_after_s=CLAIM_RETRY_S,
                    status=HTTPStatus.SERVICE_UNAVAILABLE,
                ) from error
            except StoreUnavailableError as error:
                log.warning("claim.deferred", request_id=request.request_id, error=str(error))
                claim = Claim(outcome=ClaimOutcome.BUSY)
            match claim.outcome:
                case ClaimOutcome.CLAIMED:
                    await self._put_claimed(request, stored)
                case ClaimOutcome.JOINED:
                    log.info("request.joined", request_id=request.request_id)
                case ClaimOutcome.ENDED if claim.final is not None:
                    final = _decode_final(claim.final)
                    await publish_final(self._broker, final, reply_to=request.reply_to)
                case ClaimOutcome.CONFLICT:
                    raise IdConflictError
                case _:
                    await hold(self._broker, request, CLAIM_RETRY_S)
        await delivery.settle(Settlement.ACK)

    async def _put_claimed(self, request: QueuedRequest, stored: StoredWork) -> None:
        """
        Put or hold the request of a claim, and note in the store that a queue has it.

        Raises:
            ContractError: The request has ended.
            CapacityError: The request is refused; its id is free again.
        """
        claimed = msgspec.structs.replace(stored, claimed=True)
        try:
            await self._put_or_hold(msgspec.structs.replace(request, stored=claimed))
        except MeshError:
            await self._claims.release(request)
            raise
        wait = self.state.wait_forecast(request, self._clock.now())
        expected_at = None if wait is None else request.grouped_at + wait.mean_s
        await self._claims.grouped(request, expected_at)

    async def _put_or_hold(self, request: QueuedRequest) -> str | None:
        """
        Publish a request; return the name of its queue, or None if it must not begin yet.

        Raises:
            ContractError: The request has ended.
        """
        now = self._clock.now()
        if left_s := held_for_s(request, now):
            await hold(self._broker, request, left_s)
            self.state.held += 1
            return None
        check_end(request, now)
        return await self._put(request)

    async def _accepted(self, delivery: Delivery) -> QueuedRequest:
        """
        The request in *delivery*. A request for an unknown model waits for a while, since gateways
        and producers may know a new registry sooner.

        Raises:
            ContractError: The body is invalid, or the model remains unknown.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.unknown_model_wait_s
        waits = False
        try:
            while True:
                try:
                    return self._intake.accept(delivery, self._clock.now(), self._is_late)
                except (ContractError, ModelNotReadyError) as error:
                    if not self._may_wait(error, until - loop.time(), waits=waits):
                        raise _unknown_model(error) from error
                self._num_waiting += not waits
                waits = True
                await asyncio.sleep(UNKNOWN_MODEL_PERIOD_S)
        finally:
            self._num_waiting -= waits

    def _is_late(self, request: QueuedRequest) -> bool:
        """Return whether a request would probably be late; False if its wait is unknown."""
        now = self._clock.now()
        left_s = request.slo.planning_deadline_at(request.arrived_at) - now
        forecast = self.state.forecast(request.lane, now)
        if forecast is None or not math.isfinite(left_s):
            return False
        return late_with(forecast, left_s) >= LATE_PROBABILITY

    def _may_wait(self, error: MeshError, left_s: Seconds, *, waits: bool) -> bool:
        """Return whether a request that was refused with *error* may wait for its model."""
        is_unknown = isinstance(error, ModelNotReadyError) or (
            isinstance(error, ContractError) and error.code == "model_not_found"
        )
        has_room = waits or self._num_waiting < self._settings.max_unknown_model_waiting
        return is_unknown and has_room and left_s > 0

    async def _put(self, request: QueuedRequest) -> str:
        """Publish an admitted request and count it; return the name of the queue."""
        self._check(request)
        if await self.tenants.admit(request):
            # Other requests were admitted while this one waited.
            self._check_again(request)
        now, tokens = self._clock.now(), tokens_needed(request)
        if self.routing is not None:
            request = self.routing.stamped(request)
        # Decided once, when the request arrives: later requests of its tenant do not change it.
        above_share = self.state.shares.above_share(request.tenant, tokens)
        # Count before any await: concurrent requests of a burst must see the new total, and the
        # message about the end of this request must find it in the total.
        is_new = self.state.admit(request.request_id, request.tenant, tokens, at=now)
        try:
            await self.expiry.watch(request, request.lane)
            queue = await self.placement.put(request, above_share=above_share)
        except BaseException:  # also when the publish is cancelled: no other code reverts the count
            if is_new:
                self._finish(request.request_id, request.tenant)
            self.expiry.forget(request)
            raise
        self.expiry.moved(request, queue)
        self.state.count(request, queue=queue, at=self._clock.now())
        note_placed(request)
        return queue

    def _check(self, request: QueuedRequest) -> None:
        policy = self.tenants.policies.policy(request.tenant)
        check_admission(
            request,
            self.state,
            self._settings,
            self._clock.now(),
            has_policy_limit=policy.outstanding_tokens is not None,
        )

    def _check_again(self, request: QueuedRequest) -> None:
        try:
            self._check(request)
        except CapacityError:
            self._finish(request.request_id, request.tenant)
            raise

    def _finish(self, request_id: RequestId, tenant: TenantId) -> None:
        """A request no longer counts for its tenant."""
        self.state.finish(request_id, tenant)
        self.tenants.ended(tenant, request_id)

    async def _refuse(self, delivery: Delivery, error: MeshError) -> None:
        info = error_info(error)
        note_refused(info.code)
        request_id = request_id_of(delivery)
        has_ended = info.code == DEADLINE_EXPIRED and info.status == HTTPStatus.GATEWAY_TIMEOUT
        if has_ended:
            log.info("request.expired", request_id=request_id, queue=delivery.queue)
            self.state.expired["arrival"] += 1
        else:
            log.info("request.refused", request_id=request_id, code=info.code, param=info.param)
            self.state.refused += 1
            self.state.limited += isinstance(error, RateLimitedError)
        failed = RequestFailed(request_id=request_id, error=info, at=self._clock.now())
        if not isinstance(error, IdConflictError):
            await self._send_to_store(delivery, failed)
        await publish_final(self._broker, failed, reply_to=delivery.reply_to)
        if self.expiry.stories is not None and not isinstance(error, CapacityError):
            self.expiry.stories.ended(self._refused_story(delivery, failed))
        # A tenant far above its limits must not fill the dead letters; its producer knows.
        is_limited = isinstance(error, RateLimitedError) and delivery.reply_to
        if not has_ended and not is_limited:
            await dead_letter_refused(self._broker, delivery, info)
        await delivery.settle(Settlement.ACK)

    def _refused_story(self, delivery: Delivery, failed: RequestFailed) -> Story:
        """The record of a refused request; a message that is not a request has only its id."""
        story = Story(request_id=failed.request_id, tenant=self._intake.claimed_tenant(delivery))
        if delivery.queue == topology.HELD:
            with suppress(ContractError):
                story = story_of(_decode_queued(delivery.body))
        return ended(story, outcome=failed.error.code, at=failed.at)

    async def _send_to_store(self, delivery: Delivery, failed: RequestFailed) -> None:
        """Send a failure to the store, if it may have to keep the final of the request."""
        if delivery.queue == topology.HELD:
            with suppress(ContractError):  # not a request: the store knows nothing of it
                request = _decode_queued(delivery.body)
                # Without a claim, it may repeat a request that a queue has.
                has_claim = request.stored is not None and request.stored.claimed
                await publish_final(
                    self._broker,
                    failed,
                    reply_to=None,
                    stored_for=stored_for(request),
                    headers=None if has_claim else {REFUSAL_HEADER: "true"},
                )
        elif (tenant := self._intake.stored_tenant(delivery)) is not None:
            await publish_final(
                self._broker,
                failed,
                reply_to=None,
                stored_for=tenant,
                headers={REFUSAL_HEADER: "true"},
            )

    def on_ended(self, observed: RequestObserved) -> None:
        """Handle the end of a request: reduce its tenant's share, and learn its prompt length."""
        if self.routing is not None:
            self.routing.on_ended(observed)
        self.expiry.on_observed(observed)
        self._finish(observed.request_id, observed.tenant)
        self._intake.learn(observed)

    def on_profile(self, profile: Profile) -> None:
        """Store a profile from the estimator: costs of an engine, and a model's answer lengths."""
        self._intake.work.learn(profile)
        if self.routing is not None:
            self.routing.on_profile(profile)

    def on_forecast(self, forecast: LanesForecast) -> None:
        """Store the leader's forecasts of lanes."""
        self.state.on_forecast(forecast, self._clock.now())

    async def report(self) -> None:
        """End requests whose ends were not heard, and publish lane totals."""
        before = self._clock.now() - OUTSTANDING_MEMORY_S
        self.state.expire_outstanding(before)
        self.tenants.expire(before)
        await self.reports.publish()


def _unknown_model(error: ContractError | ModelNotReadyError) -> ContractError:
    """The error for the producer of a request whose model remains unknown."""
    if isinstance(error, ContractError):
        return error
    return ContractError(str(error), code="model_not_ready", param="model", status=503)
