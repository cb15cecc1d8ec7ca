"""Puts admitted requests into inboxes, lanes, overflow and delay queues, and notifies agents."""

import asyncio
from dataclasses import dataclass

import msgspec
import structlog

from services.planner.routed.routing import Routing
from services.planner.state import GrouperState
from shared.broker import topology
from shared.broker.protocol import Broker, PublishOutcome
from shared.broker.retry import publish_until_confirmed
from shared.broker.work_queues import WorkQueues, queued_message, stored_message
from shared.contracts.base import Seconds, UnixTime
from shared.contracts.ends import expiration_s, expired_error, nearest_end
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.lanes import LaneKey, inbox_name
from shared.contracts.requests import QueuedRequest
from shared.runtime.clock import Clock

log = structlog.get_logger()


def check_end(request: QueuedRequest, now: UnixTime, place: str = "it was never grouped") -> None:
    """
    Check that a request has not reached its end.

    Args:
        request: The request.
        now: Unix seconds.
        place: Where the request is, for the error.

    Raises:
        ContractError: It has.
    """
    end = nearest_end(request)
    if end.at <= now:
        info = expired_error(end, arrived_at=request.arrived_at, place=place)
        raise ContractError(info.message, code=info.code, param=info.param, status=info.status)


def held_for_s(request: QueuedRequest, now: UnixTime) -> Seconds:
    """
    Time until *request* may begin; 0 if it may begin now.

    A request with `not_before` has this time as its arrival, since its targets count from it.
    """
    return max(0.0, request.arrived_at - now)


async def hold(broker: Broker, request: QueuedRequest, left_s: Seconds) -> None:
    """
    Put *request* into the delay queue with the longest delay that is not above *left_s*; the
    shortest one makes it at most a quarter of a second late.

    Raises:
        TransientError: The broker did not accept the request.
    """
    queue = topology.delay_queue(left_s)
    # The message needs no lifetime of its own: the request ends later than it may begin.
    message = stored_message(request)
    outcome = await publish_until_confirmed(broker, topology.LANES, queue.name, message)
    if outcome is PublishOutcome.UNROUTABLE:
        await topology.declare_delay_queue(broker, queue)
        outcome = await publish_until_confirmed(broker, topology.LANES, queue.name, message)
    if outcome is not PublishOutcome.CONFIRMED:
        raise TransientError(f"{queue.name} did not accept the request: {outcome.value}")


@dataclass(slots=True, kw_only=True)
class Placement:
    """
    The queue of each admitted request.

    Args:
        broker: The broker.
        queues: The work queues of this process.
        state: State of the grouper.
        clock: Wall time.
        routing: Chooses instances; None: instances pull all requests.
    """

    broker: Broker
    queues: WorkQueues
    state: GrouperState
    clock: Clock
    routing: Routing | None

    async def put(self, request: QueuedRequest, *, above_share: bool) -> str:
        """
        Publish a request; return the name of its queue.

        Args:
            request: An admitted request.
            above_share: True if the tenant is above its share: such a request is not routed.

        Raises:
            ContractError: The request has reached its end.
            TransientError: The queue did not accept the request, or the broker cannot be used.
        """
        if above_share:
            return await self._overflowed(request)
        return await self._routed(request) or await self._laned(request)

    async def _routed(self, request: QueuedRequest) -> str | None:
        """
        Publish a request to the inbox of the chosen instance; return None if no instance was
        chosen.
        """
        if self.routing is None:
            return None
        left_s = expiration_s(request, self.clock.now())
        try:
            async with asyncio.timeout(left_s):
                instance_id = await self.routing.place(request)
        except TransientError:
            raise
        except TimeoutError:
            place = "it waited for its turn to be sent to an instance"
            check_end(request, nearest_end(request).at, place)
            raise
        except Exception:  # a bug in routing only sends the request to its lane
            log.exception("routing.broken", request_id=request.request_id)
            return None
        if instance_id is None:
            return None
        inbox, message = inbox_name(instance_id), queued_message(request, self.clock.now())
        outcome = await publish_until_confirmed(self.broker, topology.LANES, inbox, message)
        if outcome is not PublishOutcome.CONFIRMED:
            log.info("inbox.closed", instance_id=instance_id, request_id=request.request_id)
            return None
        self.state.routed_at[instance_id] = self.clock.now()
        await self.queues.notify(inbox)
        return inbox

    async def _laned(self, request: QueuedRequest) -> str:
        queue = LaneKey.parse(request.lane).queue_name
        predicted_wait = self.state.wait_forecast(request, self.clock.now())
        with self.state.entry(request.lane):
            await self._publish(
                queue, msgspec.structs.replace(request, predicted_wait=predicted_wait)
            )
        return queue

    async def _overflowed(self, request: QueuedRequest) -> str:
        """Publish a request of a tenant above its share to the overflow queue of its lane."""
        queue = LaneKey.parse(request.lane).overflow_name
        await self._publish(queue, request)
        return queue

    async def _publish(self, queue: str, request: QueuedRequest) -> None:
        outcome = await self.queues.publish(queue, queued_message(request, self.clock.now()))
        if outcome is not PublishOutcome.CONFIRMED:
            raise TransientError(f"lane {queue} did not accept the request: {outcome.value}")
