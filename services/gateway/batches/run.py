"""Runs one batch: publishes its lines at the pace that the mesh absorbs, and collects what ends."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from services.gateway.batches.lines import InvalidInputError, LineState, LineTable, Scanner
from services.gateway.batches.publishing import LINES_AT_ONCE, BatchPorts, LinePublisher
from services.gateway.batches.results import Unfinished, has_expired, is_retried
from services.gateway.batches.writing import PURPOSE, ResultFiles, decode_final, read_lines
from shared.contracts.base import RequestId, Seconds, UnixTime
from shared.contracts.errors import CapacityError, StoreFullError, TransientError
from shared.contracts.requests import RequestFailed
from shared.store.bodies import MissingBodyError
from shared.store.ids import line_request_id
from shared.store.leases import Lease
from shared.store.objects.batches import BatchCounts, BatchEnd, BatchStatus, StoredBatch
from shared.store.objects.webhooks import Notice
from shared.store.store import Store
from solver.storage.expected_end import ExpectedEnd
from solver.storage.pace import Pace, PaceLimits, due_at

log = structlog.get_logger()
T = TypeVar("T")

BYTES_AT_ONCE = 2**20
"""Maximum size of the lines that are published together; one line may be larger."""
STATES_AT_ONCE = 500
COUNT_PERIOD_S: Seconds = 1.0
RETRY_S: Seconds = 1.0
MOST_RETRY_S: Seconds = 60.0
COMPLETED = "completed"
_REASONS = {
    BatchStatus.CANCELLED: Unfinished.CANCELLED,
    BatchStatus.EXPIRED: Unfinished.EXPIRED,
}
"""Status of a batch -> why lines without a final have none."""


class BatchRun:
    """
    One batch, from the check of its input to its results.

    All that is not in the store can be found again: after a crash, another process takes the lease
    and repeats what it is unsure of. That is harmless, since lines are published under ids.

    Args:
        ports: What all batches use.
        batch: The batch, read after its lease was taken.
        lease: Its lease, which the caller renews.
    """

    def __init__(self, ports: BatchPorts, batch: StoredBatch, lease: Lease) -> None:
        self._ports = ports
        self._store = ports.store
        self._publisher = LinePublisher(ports, batch)
        self._batch = batch
        self._lease = lease
        self._status = batch.status
        self._table = LineTable()
        self._cursor = batch.submitted_lines
        self._again: deque[int] = deque()
        """Lines before the cursor that have to be published again."""
        self._outstanding: dict[RequestId, int] = {}
        self._unsure: dict[RequestId, int] = {}
        """Lines that may be in the mesh, but have to be published again."""
        self._most_outstanding = 0
        """Since the last refusal."""
        self._started: set[RequestId] = set()
        self._num_started = 0
        self._has_expired = False
        self._counted_at: UnixTime = 0.0
        self._poll_s = ports.settings.poll_s
        settings = ports.settings
        self._pace = Pace(
            PaceLimits(
                min_waiting=min(settings.min_waiting, settings.max_waiting),
                max_waiting=settings.max_waiting,
                max_outstanding=settings.max_outstanding,
                lead_s=settings.lead_s,
            )
        )
        self._expected: ExpectedEnd | None = None

    async def run(self) -> None:
        """
        Run the batch to its end. While the store or the broker is away, it waits.

        Raises:
            StaleLeaseError: Another process runs the batch.
        """
        batch = self._batch
        try:
            await self._patiently(self._prepare)
            status = await self._until_over()
            await self._settle(status)
            await self._patiently(partial(self._finish, status))
        except (InvalidInputError, MissingBodyError) as error:
            await self._patiently(partial(self._fail, error))
            status = BatchStatus.FAILED
        await self._patiently(self._clean)
        log.info("batch.ended", batch_id=batch.id, tenant=batch.tenant, status=status.value)

    async def _patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        """
        Result of *step*, which can be repeated, as soon as the store and the broker can be used.

        Raises:
            MissingBodyError: The input was deleted.
        """
        while True:
            try:
                return await self._tried(step)
            except MissingBodyError:
                raise
            except (TransientError, CapacityError, StoreFullError) as error:
                log.warning("batch.delayed", batch_id=self._batch.id, error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _tried(self, step: Callable[[], Awaitable[T]]) -> T:
        try:
            return await step()
        except MissingBodyError:
            # Without the disk of bodies, every input would seem deleted.
            await self._store.require_bodies()
            raise

    async def _prepare(self) -> None:
        """Find the lines of the input, and how far each is."""
        batch, settings = self._batch, self._ports.settings
        scanner = Scanner(
            endpoint=batch.endpoint,
            check=self._publisher.check,
            max_lines=settings.max_lines,
            max_body_bytes=self._ports.max_body_bytes,
        )
        async with aclosing(_blocks(self._store, batch)) as blocks:
            async for block in blocks:
                # In a thread, since parsing takes long and the gateway serves others.
                await asyncio.to_thread(scanner.feed, block)
        self._table = scanner.end()
        num_invalid = self._table.count(LineState.INVALID)
        if not batch.num_lines:
            await self._store.batches.begin(
                self._lease, batch.id, num_lines=len(self._table), num_failed=num_invalid
            )
            log.info("batch.begun", batch_id=batch.id, lines=len(self._table), invalid=num_invalid)
        await self._restore()
        self._expected = ExpectedEnd(
            num_lines=len(self._table),
            num_ended=self._num_ended,
            now=self._ports.clock.now(),
            results_s=self._ports.result_pace.expected_s(len(self._table)),
        )

    async def _restore(self) -> None:
        """
        Find out how far the lines are that may be in the mesh: those before the cursor, and those
        of a chunk that was published and not noted. They are published again if they have no
        final, which joins what is under way.
        """
        end = self._chunk_end(LINES_AT_ONCE)
        numbers = self._to_do(end)
        for first in range(0, len(numbers), STATES_AT_ONCE):
            await self._take(numbers[first : first + STATES_AT_ONCE])
        self._again = deque(self._to_do(self._cursor))
        unsure = self._to_do(end)
        self._unsure = {line_request_id(self._batch.id, number): number for number in unsure}

    def _chunk_end(self, most: int) -> int:
        """End of the next chunk of new lines, of which it has at most *most*."""
        if self._cursor == len(self._table):
            return self._cursor
        return self._table.end_of(self._cursor, max_lines=most, max_bytes=BYTES_AT_ONCE)

    def _to_do(self, end: int) -> list[int]:
        """Lines before *end* that have to be published, as far as is known."""
        states = self._table.states
        return [number for number in range(end) if states[number] == LineState.TO_DO]

    async def _until_over(self) -> BatchStatus:
        """Publish and collect until the batch is complete, cancelled or expired."""
        while True:
            found = await self._patiently(self._round)
            if found is not BatchStatus.IN_PROGRESS:
                return found
            await asyncio.sleep(self._poll_s)

    async def _round(self) -> BatchStatus:
        """Collect, count and publish once; return the status that the batch should have."""
        await self._collect()
        now = self._ports.clock.now()
        if now >= self._counted_at + COUNT_PERIOD_S or not self._table.num_left:
            await self._count(now)
        if self._status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED
        if not self._table.num_left:
            return BatchStatus.EXPIRED if self._has_expired else BatchStatus.COMPLETED
        if now >= self._batch.expires_at:
            return BatchStatus.EXPIRED
        await self._publish()
        return BatchStatus.IN_PROGRESS

    async def _collect(self) -> None:
        """Take note of lines that have started or ended."""
        before = self._num_ended
        numbers = list(self._outstanding.values())
        for first in range(0, len(numbers), STATES_AT_ONCE):
            await self._take(numbers[first : first + STATES_AT_ONCE])
        now = self._ports.clock.now()
        self._pace.observe(self._num_started, now)
        has_news = self._num_ended > before or not numbers
        least_s = self._ports.settings.poll_s
        self._poll_s = least_s if has_news else min(max(1.0, least_s), self._poll_s * 1.5)

    async def _take(self, numbers: Sequence[int]) -> None:
        """Take note of how far lines are, by their rows."""
        batch, table = self._batch, self._table
        ids = {line_request_id(batch.id, number): number for number in numbers}
        states = await self._store.requests.states(batch.tenant, ids)
        failed: list[RequestId] = []
        for request_id, number in ids.items():
            state = states.get(request_id)
            if state is None:
                self._publish_again(request_id, number)
            elif state.outcome == COMPLETED:
                self._end_line(request_id)
                table.states[number] = LineState.COMPLETED
            elif state.outcome is not None:
                failed.append(request_id)
            elif state.has_started and request_id not in self._started:
                self._started.add(request_id)
                self._num_started += 1
        if failed:
            await self._take_failed(failed, ids)

    async def _take_failed(self, failed: list[RequestId], numbers: dict[RequestId, int]) -> None:
        batch = self._batch
        finals = await self._store.requests.ended(batch.tenant, failed)
        refused: list[RequestId] = []
        retry_after_s = 0.0
        for request_id, encoded in finals.items():
            final = decode_final(encoded)
            if isinstance(final, RequestFailed) and is_retried(final):
                refused.append(request_id)
                wait_s = final.error.retry_after_s
                retry_after_s = max(retry_after_s, RETRY_S if wait_s is None else wait_s)
                continue
            self._end_line(request_id)
            self._table.states[numbers[request_id]] = LineState.FAILED
            if isinstance(final, RequestFailed) and has_expired(final, batch.expires_at):
                self._has_expired = True
        if not refused:
            return
        # The refusal is not the line's result: without the row, the id can be asked again.
        await self._store.requests.remove(batch.tenant, refused)
        for request_id in refused:
            self._publish_again(request_id, numbers[request_id])
        self._pace.refused(
            admitted=self._most_outstanding - len(refused),
            retry_after_s=min(retry_after_s, MOST_RETRY_S),
            now=self._ports.clock.now(),
        )
        self._most_outstanding = len(self._outstanding)
        log.info("batch.held", batch_id=batch.id, lines=len(refused), retry_after_s=retry_after_s)

    def _publish_again(self, request_id: RequestId, number: int) -> None:
        self._outstanding.pop(request_id, None)
        self._started.discard(request_id)
        self._table.states[number] = LineState.TO_DO
        self._again.append(number)

    def _end_line(self, request_id: RequestId) -> None:
        if self._outstanding.pop(request_id, None) is None:
            return
        if request_id in self._started:
            self._started.discard(request_id)
        else:
            self._num_started += 1

    @property
    def _num_ended(self) -> int:
        return len(self._table) - self._table.num_left

    async def _count(self, now: UnixTime) -> None:
        """Update the counts in the store, and read whether the batch was cancelled."""
        expected = self._expected
        if expected is not None:
            expected.observe(self._num_ended, now)
        table = self._table
        counts = BatchCounts(
            num_completed=table.count(LineState.COMPLETED),
            num_failed=table.count(LineState.FAILED) + table.count(LineState.INVALID),
            lines_per_s=None if expected is None else expected.rate_per_s,
            expected_at=None if expected is None else expected.expected_at(),
        )
        self._status = await self._store.batches.count(self._lease, self._batch.id, counts)
        self._counted_at = now

    async def _publish(self) -> None:
        """Publish as many lines as the pace allows."""
        batch, now = self._batch, self._ports.clock.now()
        allowed = self._pace.allowance(
            waiting=len(self._outstanding) - len(self._started),
            outstanding=len(self._outstanding),
            left=self._table.num_left,
            time_left_s=due_at(batch.created_at, batch.expires_at, now) - now,
            now=now,
        )
        while allowed > 0 and (self._again or self._cursor < len(self._table)):
            allowed -= await self._publish_some(min(allowed, LINES_AT_ONCE))

    async def _publish_some(self, most: int) -> int:
        """Publish at most *most* lines; return how many were taken from those to be published."""
        if self._again:
            numbers = [self._again[place] for place in range(min(most, len(self._again)))]
            lines = [
                (await read_lines(self._store, self._batch, self._table, number, number + 1))[0]
                for number in numbers
            ]
            await self._sent(numbers, lines)
            for _ in numbers:
                self._again.popleft()
            return len(numbers)
        first = self._cursor
        end = self._chunk_end(most)
        lines = await read_lines(self._store, self._batch, self._table, first, end)
        valid = [
            (number, line)
            for number, line in zip(range(first, end), lines, strict=True)
            if self._table.states[number] == LineState.TO_DO
        ]
        await self._sent([number for number, _ in valid], [line for _, line in valid])
        # Lines of a chunk that was not noted are published again after a crash: ids join them.
        await self._store.batches.move_cursor(self._lease, self._batch.id, end)
        self._cursor = end
        return end - first

    async def _sent(self, numbers: Sequence[int], lines: Sequence[bytes]) -> None:
        ids = {line_request_id(self._batch.id, number): number for number in numbers}
        # If it fails, some may have been published.
        self._unsure |= ids
        await self._publisher.send(numbers, lines)
        for request_id, number in ids.items():
            del self._unsure[request_id]
            self._outstanding[request_id] = number
            self._table.states[number] = LineState.OUTSTANDING
        self._most_outstanding = max(self._most_outstanding, len(self._outstanding))

    async def _settle(self, status: BatchStatus) -> None:
        """Wait for a while for lines that still run, unless all lines have ended."""
        self._outstanding |= self._unsure
        cancels = status is BatchStatus.CANCELLED
        if cancels:
            await self._publisher.cancel(self._outstanding)
        clock, settings = self._ports.clock, self._ports.settings
        until = clock.now() + settings.settle_s
        while self._outstanding and clock.now() < until:
            await self._patiently(self._collect)
            await asyncio.sleep(settings.poll_s)
        if not cancels:
            await self._publisher.cancel(self._outstanding)

    async def _finish(self, status: BatchStatus) -> None:
        """Write the results and end the batch."""
        batch, store, clock = self._batch, self._store, self._ports.clock
        begun_at = clock.now()
        await store.batches.finalize(self._lease, batch.id)
        files = ResultFiles(
            store,
            batch,
            self._table,
            parse=self._publisher.parse,
            reason=_REASONS.get(status),
        )
        output, errors = await files.write(self._ports.kept.retention_of(batch.tenant, PURPOSE))
        counts = BatchCounts(num_completed=files.num_completed, num_failed=files.num_failed)
        end = BatchEnd(
            status=status,
            counts=counts,
            output=output,
            errors_file=errors,
            notice=self._notice(status),
        )
        await store.batches.end(self._lease, batch.id, end)
        self._ports.result_pace.observe(
            num_lines=len(self._table), elapsed_s=clock.now() - begun_at
        )

    async def _fail(self, error: InvalidInputError | MissingBodyError) -> None:
        """End a batch whose input cannot be read."""
        code = error.code if isinstance(error, InvalidInputError) else "input_file_lost"
        reason = {"code": code, "message": str(error), "param": None, "line": None}
        await self._publisher.cancel(self._outstanding | self._unsure)
        end = BatchEnd(
            status=BatchStatus.FAILED,
            counts=BatchCounts(num_completed=0, num_failed=0),
            errors=msgspec.json.encode([reason]).decode(),
            notice=self._notice(BatchStatus.FAILED),
        )
        await self._store.batches.end(self._lease, self._batch.id, end)

    def _notice(self, status: BatchStatus) -> Notice | None:
        """The event about the end of the batch, for the tenant's webhooks."""
        batch = self._batch
        return self._ports.webhooks.notice(batch.tenant, f"batch.{status.value}", batch.id)

    async def _clean(self) -> None:
        """Remove the rows of the lines, whose results are in the files."""
        batch = self._batch
        for first in range(0, len(self._table), STATES_AT_ONCE):
            end = min(first + STATES_AT_ONCE, len(self._table))
            ids = [line_request_id(batch.id, number) for number in range(first, end)]
            await self._store.requests.remove(batch.tenant, ids)


async def _blocks(store: Store, batch: StoredBatch) -> AsyncGenerator[bytes, None]:
    async for block in store.bodies.read(batch.input_body):
        yield block
