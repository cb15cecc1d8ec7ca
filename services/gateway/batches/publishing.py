"""Publishes lines of a batch under their ids, and cancels them."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import structlog

from services.gateway.batches.forms import LineTerms, check_line, message_of
from services.gateway.batches.lines import FRAME_BYTES, BatchLine, parse_line
from services.gateway.batches.settings import BatchSettings
from services.gateway.errors import error_info
from services.gateway.webhooks.settings import WebhookSettings
from shared.api.calls import CallFields, call_body, call_fields
from shared.api.digests import call_digest
from shared.contracts.base import RequestId, Seconds, TenantId, UnixTime, encode
from shared.contracts.errors import ContractError, TransientError
from shared.contracts.ingress import CallRequest, InferenceRequest
from shared.contracts.qos import Slo
from shared.contracts.requests import RequestFailed
from shared.models.registry import ModelRegistry
from shared.runtime.clock import Clock
from shared.store.ids import line_request_id
from shared.store.objects.batches import StoredBatch
from shared.store.requests.records import Asked, Ended
from shared.store.settings import StoreSettings
from shared.store.store import Store
from solver.storage.expected_end import ResultPace
from solver.storage.pace import due_at

log = structlog.get_logger()

LINES_AT_ONCE = 64
"""Maximum number of lines that are published together."""
KEPT_AFTER_END_S: Seconds = 24 * 3600.0
"""Time after the window for which finals of lines are kept, if the batch cannot be ended then."""


_slo = msgspec.json.Decoder(Slo)


class Publisher(Protocol):
    """What publishes lines: the gateway's producer."""

    async def publish_stored(self, body: CallRequest | InferenceRequest, *, digest: str) -> None:
        """Publish a request whose final only the store gets."""
        ...

    async def cancel_stored(self, tenant: TenantId, request_id: RequestId) -> None:
        """Cancel a request that the store knows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPorts:
    """What all batches of a gateway use."""

    store: Store
    producer: Publisher
    registry: ModelRegistry
    settings: BatchSettings
    kept: StoreSettings
    """Settings of the store, for the life of result files."""
    webhooks: WebhookSettings
    max_body_bytes: int
    clock: Clock
    result_pace: ResultPace = field(default_factory=ResultPace)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A line that is about to be published."""

    number: int
    asked: Asked
    message: CallRequest | InferenceRequest | ContractError
    """The request, or why the line cannot be published."""


class LinePublisher:
    """
    Publishes lines of one batch.

    Args:
        ports: What all batches use.
        batch: The batch.
    """

    def __init__(self, ports: BatchPorts, batch: StoredBatch) -> None:
        self._ports = ports
        self._store = ports.store
        self._batch = batch

    async def send(self, numbers: Sequence[int], lines: Sequence[bytes]) -> None:
        """
        Make the rows of lines, then publish them. Doing it again is harmless.

        Args:
            numbers: Number of each line.
            lines: The lines, as they are in the input.

        Raises:
            BrokerUnavailableError: The broker did not confirm all lines in time.
            CapacityError: The global queue is full.
            StoreUnavailableError: The store cannot be used now.
        """
        now = self._ports.clock.now()
        prepared = await asyncio.to_thread(
            lambda: [
                self._prepared(number, line, now)
                for number, line in zip(numbers, lines, strict=True)
            ]
        )
        await self._store.requests.ask([each.asked for each in prepared])
        results = await asyncio.gather(*map(self._published, prepared), return_exceptions=True)
        refused: list[Ended] = []
        for each, result in zip(prepared, results, strict=True):
            if isinstance(result, ContractError):
                refused.append(_refusal(each.asked, result, now))
            elif result is not None:
                raise result
        if refused:
            await self._store.requests.end(refused)

    async def _published(self, prepared: _Prepared) -> None:
        if isinstance(prepared.message, ContractError):
            raise prepared.message
        await self._ports.producer.publish_stored(prepared.message, digest=prepared.asked.digest)

    def _prepared(self, number: int, line: bytes, now: UnixTime) -> _Prepared:
        batch, request_id = self._batch, line_request_id(self._batch.id, number)
        terms = LineTerms(
            tenant=batch.tenant,
            request_id=request_id,
            endpoint=batch.endpoint,
            slo=self._slo(now),
            expires_at=batch.expires_at,
            now=now,
        )
        message: CallRequest | InferenceRequest | ContractError
        body, model = line, ""
        try:
            parsed = self.parse(line)
            body, model = parsed.body, call_body(call_fields(parsed.body)).model
            message = message_of(parsed, terms)
        except ContractError as error:
            message = error
        asked = Asked(
            tenant=batch.tenant,
            request_id=request_id,
            digest=call_digest(batch.endpoint, body),
            endpoint=batch.endpoint,
            model=model,
            kept_s=max(0.0, batch.expires_at - now) + KEPT_AFTER_END_S,
        )
        return _Prepared(number, asked, message)

    def _slo(self, now: UnixTime) -> Slo:
        """Targets of lines that set none."""
        batch = self._batch
        if batch.slo is not None:
            return _slo.decode(batch.slo)
        return Slo(deadline_at=due_at(batch.created_at, batch.expires_at, now))

    async def cancel(self, request_ids: Iterable[RequestId]) -> None:
        """Cancel lines; those that cannot be cancelled now end by themselves."""
        tenant, ids = self._batch.tenant, list(request_ids)
        for first in range(0, len(ids), LINES_AT_ONCE):
            some = ids[first : first + LINES_AT_ONCE]
            cancel = self._ports.producer.cancel_stored
            results = await asyncio.gather(
                *(cancel(tenant, request_id) for request_id in some), return_exceptions=True
            )
            for result in results:
                if isinstance(result, TransientError):
                    log.warning("batch.cancel_lost", batch_id=self._batch.id, error=str(result))
                    return
                if result is not None:
                    raise result

    def check(self, fields: CallFields) -> None:
        """
        Check that the mesh can serve a body.

        Raises:
            ContractError: It cannot.
        """
        check_line(self._ports.registry, self._batch.endpoint, fields)

    def parse(self, raw: bytes) -> BatchLine:
        """
        The request in a line of the input.

        Raises:
            ContractError: The line is invalid.
        """
        limit = self._ports.max_body_bytes + FRAME_BYTES
        if len(raw) > limit:
            raise ContractError(
                f"the line has {len(raw)} bytes; the limit is {limit}", code="line_too_large"
            )
        return parse_line(raw, endpoint=self._batch.endpoint, check=self.check)


def _refusal(asked: Asked, error: ContractError, now: UnixTime) -> Ended:
    """The end of a line that could not be published."""
    final = RequestFailed(request_id=asked.request_id, error=error_info(error), at=now)
    return Ended(
        tenant=asked.tenant,
        request_id=asked.request_id,
        outcome=final.error.code,
        final=encode(final),
        at=now,
        is_refusal=True,
    )
