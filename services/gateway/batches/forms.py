"""The requests that lines of batches become."""

from dataclasses import dataclass

import msgspec

from services.gateway.batches.lines import BatchLine
from shared.api.calls import CallBody, CallFields, call_body, call_fields
from shared.api.pooling import check_call_task
from shared.contracts.base import RequestId, TenantId, UnixTime
from shared.contracts.errors import ContractError, ModelNotReadyError
from shared.contracts.ingress import CallRequest
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Importance, Slo
from shared.models.registry import ModelRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTerms:
    """What the batch adds to a line that is published."""

    tenant: TenantId
    request_id: RequestId
    endpoint: str
    slo: Slo
    """Targets of a line that sets none."""
    expires_at: UnixTime
    now: UnixTime


def check_line(registry: ModelRegistry, endpoint: str, fields: CallFields) -> None:
    """
    Check that the mesh can serve the body of a line.

    Raises:
        ContractError: It cannot; the message says why.
    """
    body = call_body(fields)
    if body.stream:
        raise ContractError(
            "the results of a batch are not streamed: leave stream out", param="body.stream"
        )
    entry = _entry(registry, body.model)
    if entry is not None and not entry.takes_bodies:
        check_call_task(endpoint, entry, param="body.model")


def message_of(line: BatchLine, terms: LineTerms) -> CallRequest:
    """
    The request for a line; may take long for a large body.

    Raises:
        ContractError: The body is invalid.
    """
    body = call_body(call_fields(line.body))
    return CallRequest(
        endpoint=terms.endpoint,
        body=msgspec.Raw(line.body),
        id=terms.request_id,
        tenant=terms.tenant,
        slo=None if _sets_targets(body) else terms.slo,
        importance=None if _sets_importance(body) else Importance.LOW,
        arrived_at=terms.now,
        expires_at=_first_end(body.expires_at, terms.expires_at),
    )


def _entry(registry: ModelRegistry, name: str) -> ModelEntry | None:
    """
    The entry of a model; None while this process does not know it and others do.

    Raises:
        ContractError: There is no such model.
    """
    try:
        return registry.entry(registry.resolve(name).base)
    except ModelNotReadyError:
        return None


def _sets_targets(body: CallBody) -> bool:
    return body.slo is not None or body.deadline is not None


def _sets_importance(body: CallBody) -> bool:
    return body.importance is not None or body.service_tier == "priority"


def _first_end(of_body: UnixTime | None, of_batch: UnixTime) -> UnixTime:
    return of_batch if of_body is None else min(of_body, of_batch)
