"""Runs responses in this gateway, and takes over those of gateways that are gone."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Self

import structlog

from services.gateway.responses.objects import ending_of
from services.gateway.responses.run import ResponseRun, RunTools
from shared.broker.tasks import OwnedTasks
from shared.contracts.base import Seconds, TenantId
from shared.contracts.errors import CapacityError, StoreUnavailableError, TransientError
from shared.contracts.requests import ErrorInfo
from shared.runtime.tasks import every
from shared.store.location import this_process
from shared.store.objects.responses import StoredEvent, StoredResponse
from shared.store.objects.webhooks import Notice
from shared.store.store import Store

log = structlog.get_logger()

HELD_S: Seconds = 10.0
"""Time after the last sign of life of a gateway after which another one takes its responses."""
HOLD_PERIOD_S: Seconds = HELD_S / 4
TAKE_PERIOD_S: Seconds = 1.0
FEED_PERIOD_S: Seconds = 0.075
"""Period in which events of other gateways are looked for."""
MAX_TAKEN = 32
"""Maximum number of responses that are taken over at once."""
MAX_EPOCH = 100
"""Number of gateways after which a response fails that none of them could end."""
RETRY_AFTER_S: Seconds = 5.0
LOST = ErrorInfo(
    message="the gateway that answered this request is gone", code="server_error", status=502
)


class Runner:
    """
    The responses that this gateway runs.

    Args:
        store: The store.
        tools: What all runs share.
        max_running: Maximum number of running responses of one tenant here.
    """

    def __init__(self, store: Store, tools: RunTools, *, max_running: int) -> None:
        self.name = this_process()
        self._store = store
        self._tools = tools
        self._max_running = max_running
        self._tasks = OwnedTasks()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._num_running = Counter[TenantId]()
        """Also counts those that are about to run."""
        self._closing = asyncio.Event()

    @contextmanager
    def room(self, tenant: TenantId) -> Iterator[None]:
        """
        Context that keeps room for one more response of *tenant*, which begins to run in it.

        Raises:
            CapacityError: Too many run here, or are about to.
        """
        if self._num_running[tenant] >= self._max_running:
            raise CapacityError(
                f"tenant {tenant} has {self._max_running} responses running at this gateway, "
                "which is its limit",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_running[tenant] += 1
        try:
            yield
        finally:
            self._num_running[tenant] -= 1

    async def add(
        self, response: StoredResponse, events: list[StoredEvent]
    ) -> tuple[StoredResponse, ResponseRun | None]:
        """
        Store a response and run it.

        Returns:
            The response under the id, and its run; no run if the id was used before.

        Raises:
            StoreUnavailableError: The store cannot be used now.
        """
        rows = self._store.responses
        added, is_new = await rows.add(response, events, held_s=HELD_S)
        return added, self._start(added, is_new=True) if is_new else None

    async def cancel(self, response: StoredResponse) -> StoredResponse | None:
        """
        End a response as cancelled, whichever gateway runs it; no effect after its end.

        Returns:
            The response as it is then; None if it is gone.

        Raises:
            StoreUnavailableError: The store cannot be used now.
        """
        notice = self._notice(response, "response.cancelled")
        ending = partial(ending_of, error=None, notice=notice)
        ended = await self._store.responses.end(response.id, ending)
        await self.stop(response)
        return ended

    async def stop(self, response: StoredResponse) -> None:
        """Stop the work for a response that has ended or is gone, here and in the mesh."""
        if (task := self._running.get(response.id)) is not None:
            task.cancel()
        try:
            await self._tools.cancel(response.tenant, response.id)
        except TransientError as error:
            # The request then runs to its end, and its answer is not used.
            log.warning("response.not_stopped", response_id=response.id, error=str(error))

    async def hold(self) -> None:
        """
        Renew the hold on the runs of this gateway; end those that are not its own any more.

        Raises:
            StoreUnavailableError: The store cannot be used now.
        """
        running = dict(self._running)
        if not running or self._store.problem is not None:
            return
        held = await self._store.responses.hold(self.name, running, held_s=HELD_S)
        for response_id in running.keys() - held:
            running[response_id].cancel()

    async def take_over(self) -> None:
        """
        Run responses whose gateways are gone.

        Raises:
            StoreUnavailableError: The store cannot be used now.
        """
        if self._store.problem is not None or self._tools.stop.is_set():
            return
        taken = await self._store.responses.take_over(self.name, held_s=HELD_S, limit=MAX_TAKEN)
        for response in taken:
            log.info("response.taken_over", response_id=response.id, epoch=response.epoch)
            if response.is_background and response.epoch <= MAX_EPOCH:
                self._start(response, is_new=False)
                continue
            # Without `background`, its client has lost the connection and does not know the id.
            notice = self._notice(response, "response.failed")
            ending = partial(ending_of, error=LOST, notice=notice)
            await self._store.responses.end(response.id, ending, epoch=response.epoch)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """
        Context that takes responses over and follows those of other gateways; its end stops all
        runs, and leaves the responses to other gateways.

        A bug in one of its loops cancels the context's body, and is raised at its end.
        """
        loops = {
            "hold responses": every(HOLD_PERIOD_S, self.hold, stop=self._closing),
            "take responses over": every(TAKE_PERIOD_S, self.take_over, stop=self._closing),
            "follow responses": every(FEED_PERIOD_S, self._look, stop=self._closing),
        }
        try:
            async with asyncio.TaskGroup() as group:
                for name, loop in loops.items():
                    group.create_task(loop, name=name)
                try:
                    yield self
                finally:
                    await self._tasks.cancel()
                    self._closing.set()
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        if self._store.problem is not None:
            return
        try:
            await self._store.responses.let_go(self.name)
        except StoreUnavailableError as error:
            log.warning("responses.left", error=str(error))

    async def _look(self) -> None:
        """Look for events of other gateways."""
        if self._store.problem is None:
            await self._tools.feed.poll()

    def _notice(self, response: StoredResponse, kind: str) -> Notice | None:
        if not response.is_background:
            return None
        return self._tools.webhooks.notice(response.tenant, kind, response.id)

    def _start(self, response: StoredResponse, *, is_new: bool) -> ResponseRun:
        run = ResponseRun(response, self._tools, is_new=is_new)
        self._tools.feed.run_here(response.id)
        self._num_running[response.tenant] += 1
        task = self._tasks.spawn(self._run(run), name=f"response {response.id}")
        self._running[response.id] = task
        return run

    async def _run(self, run: ResponseRun) -> None:
        response = run.response
        try:
            await run.run()
        except Exception:  # a bug: another attempt follows when the hold has ended
            log.exception("response.broken", response_id=response.id)
        finally:
            if self._running.get(response.id) is asyncio.current_task():
                del self._running[response.id]
            self._num_running[response.tenant] -= 1
            self._tools.feed.run_elsewhere(response.id)
