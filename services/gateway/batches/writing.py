"""Writes the results of a batch in the order of its lines, a few lines at a time."""

from collections.abc import Callable
from contextlib import AsyncExitStack

from services.gateway.batches.lines import BatchLine, LineState, LineTable, custom_id_of
from services.gateway.batches.results import (
    LineError,
    Unfinished,
    answered,
    has_expired,
    is_retried,
    refused,
    unfinished,
    was_cancelled,
    without_response,
)
from shared.contracts.base import Decoder, Seconds, UnixTime
from shared.contracts.errors import ContractError
from shared.contracts.requests import Final, RequestCompleted
from shared.store.bodies import BodyWriter
from shared.store.files import StoredFile
from shared.store.ids import line_request_id, new_file_id
from shared.store.objects.batches import StoredBatch
from shared.store.store import Store
from solver.storage.retention import expires_at

PURPOSE = "batch_output"
LINES_AT_ONCE, BYTES_AT_ONCE = 32, 2**20
decode_final: Decoder[Final] = Decoder(Final)


class ResultFiles:
    """
    The two files of one batch.

    Args:
        store: The store.
        batch: The batch.
        table: Its lines.
        parse: Parses a line of the input, or raises `ContractError` for an invalid one.
        reason: Why lines without a final have none; None if all lines have ended.
    """

    def __init__(
        self,
        store: Store,
        batch: StoredBatch,
        table: LineTable,
        *,
        parse: Callable[[bytes], BatchLine],
        reason: Unfinished | None,
    ) -> None:
        self.num_completed = 0
        self.num_failed = 0
        self._store = store
        self._batch = batch
        self._table = table
        self._parse = parse
        self._reason = reason

    async def write(self, kept_s: Seconds | None) -> tuple[StoredFile | None, StoredFile | None]:
        """
        Write both files. They are invisible until the batch's end adds their rows.

        Args:
            kept_s: Longest life of result files; None without a limit.

        Returns:
            The output and the error file; None for a file without lines.

        Raises:
            MissingBodyError: The input was deleted.
            StoreFullError: The disk is full.
            StoreUnavailableError: The store cannot be used now.
        """
        store, now = self._store, await self._store.database.time()
        async with AsyncExitStack() as stack:
            output, errors = [
                await stack.enter_async_context(store.bodies.upload(new_file_id(now)))
                for _ in range(2)
            ]
            await self._fill(output, errors)
            for writer in (output, errors):
                if writer.num_bytes:
                    await writer.commit()
        return (
            self._row(output, "output", now, kept_s),
            self._row(errors, "error", now, kept_s),
        )

    async def _fill(self, output: BodyWriter, errors: BodyWriter) -> None:
        table, first = self._table, 0
        while first < len(table):
            end = table.end_of(first, max_lines=LINES_AT_ONCE, max_bytes=BYTES_AT_ONCE)
            ids = [line_request_id(self._batch.id, number) for number in range(first, end)]
            finals = await self._store.requests.ended(self._batch.tenant, ids)
            lines = await read_lines(self._store, self._batch, table, first, end)
            for number, request_id, raw in zip(range(first, end), ids, lines, strict=True):
                encoded = finals.get(request_id)
                final = None if encoded is None else decode_final(encoded)
                if isinstance(final, RequestCompleted):
                    self.num_completed += 1
                    body = bytes(final.response or b"null")
                    await output.write(answered(request_id, custom_id_of(raw), body))
                else:
                    self.num_failed += 1
                    await errors.write(self._failed(number, raw, final))
            first = end

    def _failed(self, number: int, raw: bytes, final: Final | None) -> bytes:
        """The line of the error file for a line of the input."""
        request_id, custom_id = line_request_id(self._batch.id, number), custom_id_of(raw)
        if final is None and self._table.states[number] == LineState.INVALID:
            return without_response(request_id, custom_id, self._refusal(raw))
        if final is None or isinstance(final, RequestCompleted):
            reason = self._reason or Unfinished.EXPIRED
            return without_response(request_id, custom_id, unfinished(reason))
        if has_expired(final, self._batch.expires_at):
            return without_response(request_id, custom_id, unfinished(Unfinished.EXPIRED))
        if self._reason is not None and (is_retried(final) or was_cancelled(final)):
            return without_response(request_id, custom_id, unfinished(self._reason))
        return refused(request_id, custom_id, final.error)

    def _refusal(self, raw: bytes) -> LineError:
        """Why a line of the input is invalid."""
        try:
            self._parse(raw)
        except ContractError as error:
            return LineError(code=error.code, message=str(error), param=error.param)
        # A valid line is invalid in its file only if another line has its id.
        return LineError(
            code="duplicate_custom_id",
            message="a line before this one has the same custom_id",
            param="custom_id",
        )

    def _row(
        self, writer: BodyWriter, kind: str, now: UnixTime, kept_s: Seconds | None
    ) -> StoredFile | None:
        if not writer.num_bytes:
            return None
        batch = self._batch
        return StoredFile(
            id=writer.body.rpartition("/")[2],
            tenant=batch.tenant,
            purpose=PURPOSE,
            filename=f"{batch.id}_{kind}.jsonl",
            num_bytes=writer.num_bytes,
            sha256=writer.sha256,
            created_at=now,
            expires_at=expires_at(now, requested_s=batch.output_expires_s, kept_s=kept_s),
            body=writer.body,
        )


async def read_lines(
    store: Store, batch: StoredBatch, table: LineTable, first: int, end: int
) -> list[bytes]:
    """
    Lines of the input from *first* up to *end*.

    Raises:
        MissingBodyError: The input was deleted.
        StoreUnavailableError: The store cannot be used now.
    """
    begin, stop = table.span(first, end)
    data = await store.bodies.part(batch.input_body, begin, stop)
    offsets = [table.starts[number] - begin for number in range(first, end)]
    return [
        data[offset : offset + table.lengths[number]]
        for number, offset in zip(range(first, end), offsets, strict=True)
    ]
