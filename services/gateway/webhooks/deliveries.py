"""Delivers webhooks from the store; one gateway at a time does it."""

import asyncio
import random
from collections.abc import Callable
from functools import partial

import structlog

from services.gateway.webhooks.sender import Answer, Sender
from services.gateway.webhooks.settings import WebhookSettings
from services.gateway.webhooks.signature import signed_headers
from shared.broker.tasks import OwnedTasks
from shared.contracts.base import Seconds
from shared.contracts.errors import StaleLeaseError, StoreUnavailableError
from shared.runtime.clock import Clock
from shared.store.leases import Lease
from shared.store.location import this_process
from shared.store.objects.webhooks import DELIVERED, Attempted, Delivery
from shared.store.store import Store
from solver.storage.retries import retry_delay_s

log = structlog.get_logger()

JOB = "webhooks"
PERIOD_S: Seconds = 1.0
"""Period in which due deliveries are looked for."""
SPARE_S: Seconds = 10.0
"""Time for which the lease outlives an attempt, so that attempts of two gateways do not overlap."""
MAX_PER_URL = 4
"""Maximum number of attempts at once for one URL."""
MAX_STEPS = 256
"""Number of times that a round looks for further deliveries while some end."""
MAX_REMOVED = 1000
"""Maximum number of old records that a round removes."""
GONE = "not configured any more"


class Deliveries:
    """
    The job of one gateway; `round` is called periodically.

    Args:
        store: The store.
        settings: URLs, secrets and limits.
        sender: Makes the attempts.
        clock: Wall time, for signatures.
        chance: Returns random numbers from 0 to 1.
    """

    def __init__(
        self,
        store: Store,
        settings: WebhookSettings,
        sender: Sender,
        clock: Clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._settings = settings
        self._sender = sender
        self._clock = clock
        self._chance = chance
        self._holder = this_process()
        self._lease: Lease | None = None
        self._tasks = OwnedTasks()
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Event and URL of each attempt in progress."""

    async def round(self) -> None:
        """
        Make the attempts that are due, if this gateway has the job or can take it.

        Raises:
            StoreUnavailableError: The store cannot be used now; the next round continues.
        """
        if self._store.problem is not None:
            return
        try:
            for _ in range(MAX_STEPS):
                if (lease := await self._renewed()) is None:
                    return
                await self._begin(lease)
                if not await self._one_ended():
                    await self._store.deliveries.remove_ended(
                        lease, older_than_s=self._settings.kept_s, limit=MAX_REMOVED
                    )
                    return
        except StaleLeaseError as error:
            log.warning("webhooks.lost", error=str(error))
            self._lease = None

    async def idle(self) -> None:
        """Wait until all attempts in progress have ended."""
        await self._tasks.wait()

    async def release(self) -> None:
        """Wait for attempts in progress, then leave the job to another gateway."""
        await self.idle()
        if self._lease is not None and self._store.problem is None:
            await self._store.leases.release(self._lease)
        self._lease = None

    async def _begin(self, lease: Lease) -> None:
        """Begin attempts that are due, as many as may run at once."""
        limit = self._settings.max_concurrent
        # One that ends during the query may be among those that it finds.
        known = set(self._running)
        # Twice the limit, since those in progress are still due.
        due = await self._store.deliveries.due(limit=2 * limit, limit_per_url=MAX_PER_URL)
        for delivery in due:
            key = (delivery.event_id, delivery.url)
            if key in known or len(self._running) >= limit:
                continue
            task = self._tasks.spawn(self._attempt(lease, delivery), name=f"webhook {key[0]}")
            self._running[key] = task
            task.add_done_callback(partial(self._ended, key))

    def _ended(self, key: tuple[str, str], _task: asyncio.Task[None]) -> None:
        del self._running[key]

    async def _one_ended(self) -> bool:
        """Wait until an attempt has ended; False if none is in progress, or all take long."""
        running = self._running.values()
        if not running:
            return False
        ended, _ = await asyncio.wait(
            running, timeout=PERIOD_S, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(ended)

    async def _renewed(self) -> Lease | None:
        duration_s = self._settings.timeout_s + SPARE_S
        leases = self._store.leases
        if self._lease is None:
            self._lease = await leases.acquire(JOB, self._holder, duration_s=duration_s)
        else:
            self._lease = await leases.renew(self._lease, duration_s=duration_s)
        return self._lease

    async def _attempt(self, lease: Lease, delivery: Delivery) -> None:
        """Make one attempt and note the result; if that fails, another attempt follows."""
        webhook = self._settings.find(delivery.tenant, delivery.url)
        if webhook is None:
            answer = Answer(outcome=GONE, is_final=True)
        else:
            now = self._clock.now()
            headers = signed_headers(
                delivery.payload,
                event_id=delivery.event_id,
                secret=webhook.secret,
                now=now,
            )
            answer = await self._sender.send(delivery.url, delivery.payload, headers, now=now)
        retry_in_s = None
        if not answer.is_final:
            retry_in_s = retry_delay_s(
                delivery.attempts + 1,
                age_s=delivery.age_s,
                give_up_after_s=self._settings.give_up_after_s,
                retry_after_s=answer.retry_after_s,
                chance=self._chance(),
            )
        self._log(delivery, answer, retry_in_s)
        attempted = Attempted(
            event_id=delivery.event_id,
            url=delivery.url,
            outcome=answer.outcome,
            retry_in_s=retry_in_s,
        )
        try:
            await self._store.deliveries.settle(lease, [attempted])
        except (StaleLeaseError, StoreUnavailableError) as error:
            log.warning("webhook.repeated", event_id=delivery.event_id, error=str(error))

    def _log(self, delivery: Delivery, answer: Answer, retry_in_s: Seconds | None) -> None:
        logged = log.bind(
            event_id=delivery.event_id,
            type=delivery.type,
            tenant=delivery.tenant,
            attempts=delivery.attempts + 1,
        )
        if answer.outcome == DELIVERED:
            logged.info("webhook.delivered")
        elif retry_in_s is None:
            logged.error("webhook.given_up", outcome=answer.outcome)
        else:
            logged.warning("webhook.failed", outcome=answer.outcome, retry_in_s=retry_in_s)
