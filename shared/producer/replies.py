"""Consumer of a producer's reply queue."""

import asyncio

from shared.broker import topology
from shared.broker.protocol import Broker, Delivery, OutMessage, Settlement, Subscription
from shared.broker.tasks import OwnedTasks
from shared.contracts.base import Decoder
from shared.contracts.control import RunStop
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.requests import Reply
from shared.producer.outstanding import Outstanding, StopOrder
from shared.runtime.clock import Clock
from shared.runtime.events import EventLogger
from shared.runtime.tasks import every

log = EventLogger(__name__)

PREFETCH = 256
TICK_S = 1.0


class ReplyReader:
    """Passes every reply to the outstanding requests, and stops runs that are not needed."""

    def __init__(
        self, broker: Broker, outstanding: Outstanding, *, clock: Clock, queue: str
    ) -> None:
        self._broker = broker
        self._outstanding = outstanding
        self._clock = clock
        self._queue = queue
        self._decode: Decoder[Reply] = Decoder(Reply)
        self._subscription: Subscription | None = None
        self._stop = asyncio.Event()
        self._tasks = OwnedTasks()

    async def start(self) -> None:
        """Declare the queue and its binding, and consume the queue."""
        several = self._broker.has_several_nodes
        kind = topology.replicated_reply_queue if several else topology.reply_queue
        queue, binding = kind(self._queue)
        await self._broker.declare_queue(queue)
        await self._broker.bind(binding)
        self._subscription = await self._broker.consume(
            queue.name, self._on_reply, prefetch=PREFETCH, gathers_acks=True
        )
        self._tasks.spawn(every(TICK_S, self._tick, stop=self._stop), name="producer tick")

    async def stop(self) -> None:
        """Stop consuming the reply queue, and wait for running handlers."""
        self._stop.set()
        await self._tasks.wait()
        if self._subscription is not None:
            await self._subscription.cancel()

    async def _tick(self) -> None:
        self._outstanding.tick(self._clock.now())

    async def _on_reply(self, delivery: Delivery) -> None:
        # Handlers run concurrently, in order of delivery up to their first suspension: awaiting
        # anything before `observe` would let tokens overtake each other.
        try:
            orders = self._outstanding.observe(self._decode(delivery.body), self._clock.now())
        except ContractError as error:
            # The message is a newer kind of reply, or invalid. No sender can be notified, so it is
            # not dead-lettered.
            log.warning("message.rejected", queue=self._queue, error=str(error))
            orders = []
        for order in orders:
            await self._send_stop(order)
        await delivery.settle(Settlement.ACK)

    async def _send_stop(self, order: StopOrder) -> None:
        request_id, stop = order
        message = OutMessage.transient(
            RunStop(request_id=request_id, run_id=stop.run_id, reason=stop.reason)
        )
        log.info("run.stopped", request_id=request_id, run_id=stop.run_id, reason=stop.reason.value)
        try:
            await self._broker.send(
                topology.CONTROL, topology.control_instance(stop.instance_id), message
            )
        except TransientError as error:
            # If a stop order is lost, a run whose output is not read continues, which only wastes
            # work.
            log.warning("run.stop_lost", run_id=stop.run_id, error=str(error))
