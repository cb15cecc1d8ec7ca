"""Forms in which lines of batches travel through the mesh, and the responses in their finals."""

from dataclasses import dataclass
from typing import Protocol

import msgspec

from services.gateway.batches.lines import BatchLine
from services.gateway.headers import Hints
from services.gateway.intake import Intake
from services.gateway.replies import Renderer
from services.gateway.routes import TEXT_ENDPOINTS
from services.gateway.shapes import CHAT, COMPLETIONS
from shared.api.calls import CallBody, CallFields, call_body, call_fields
from shared.api.pooling import check_call_task
from shared.contracts.base import RequestId, TenantId, UnixTime
from shared.contracts.errors import ContractError, ModelNotReadyError
from shared.contracts.ingress import CallRequest, InferenceRequest
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Importance, Slo
from shared.contracts.requests import RequestCompleted
from shared.models.registry import ModelRegistry

_RENDERED = dict(zip(TEXT_ENDPOINTS, (CHAT, COMPLETIONS), strict=True))
"""Endpoint of the light front -> how its answers are rendered."""


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


class LineForms(Protocol):
    """Makes requests of lines, and responses of finals."""

    def check(self, endpoint: str, fields: CallFields) -> None:
        """
        Check that the mesh can serve a body.

        Raises:
            ContractError: It cannot; the message says why.
        """
        ...

    def message(self, line: BatchLine, terms: LineTerms) -> CallRequest | InferenceRequest:
        """
        The request for a line; may take long for a large body.

        Raises:
            ContractError: The body is invalid.
        """
        ...

    def response(self, endpoint: str, final: RequestCompleted) -> bytes:
        """The response body of the endpoint."""
        ...


class CallForms:
    """
    Lines travel as calls, which engine hosts with vLLM and servers of others answer.

    Args:
        registry: The models.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    def check(self, endpoint: str, fields: CallFields) -> None:
        """As for `LineForms`."""
        body = _checked(fields)
        entry = _entry(self._registry, body.model)
        if entry is not None and not entry.takes_bodies:
            check_call_task(endpoint, entry, param="body.model")

    def message(self, line: BatchLine, terms: LineTerms) -> CallRequest | InferenceRequest:
        """As for `LineForms`."""
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

    def response(self, endpoint: str, final: RequestCompleted) -> bytes:  # noqa: ARG002 - as for `LineForms`
        """As for `LineForms`."""
        return bytes(final.response or b"null")


class TextForms:
    """
    Lines for engines without vLLM travel as prompts in tokens, as those of the light front do;
    lines for servers of others travel as calls.

    Args:
        registry: The models.
        intake: The light front's.
    """

    def __init__(self, registry: ModelRegistry, intake: Intake) -> None:
        self._registry = registry
        self._intake = intake
        self._calls = CallForms(registry)

    def check(self, endpoint: str, fields: CallFields) -> None:
        """As for `LineForms`."""
        self._calls.check(endpoint, fields)
        entry = _entry(self._registry, call_body(fields).model)
        if entry is not None and not entry.takes_bodies and endpoint not in _RENDERED:
            raise ContractError(
                f"{entry.name} is served without vLLM, which has the endpoints "
                f"{' and '.join(_RENDERED)} only",
                code="unsupported_parameter",
                param="url",
            )

    def message(self, line: BatchLine, terms: LineTerms) -> CallRequest | InferenceRequest:
        """As for `LineForms`."""
        body = call_body(call_fields(line.body))
        entry = _entry(self._registry, body.model)
        if entry is None or entry.takes_bodies:
            return self._calls.message(line, terms)
        accepted = self._intake.accept(
            line.body,
            _RENDERED[terms.endpoint].body_type,
            hints=Hints(),
            tenant=terms.tenant,
            request_id=terms.request_id,
            arrived_at=terms.now,
        )
        ingress = accepted.ingress
        return msgspec.structs.replace(
            ingress,
            slo=ingress.slo if _sets_targets(body) else terms.slo,
            importance=ingress.importance if _sets_importance(body) else Importance.LOW,
            expires_at=_first_end(ingress.expires_at, terms.expires_at),
        )

    def response(self, endpoint: str, final: RequestCompleted) -> bytes:
        """As for `LineForms`."""
        if final.response:
            return self._calls.response(endpoint, final)
        renderer = Renderer(
            _RENDERED[endpoint],
            request_id=final.request_id,
            model=final.model,
            created=int(final.timings.arrived_at),
            include_usage=False,
        )
        return renderer.whole(final)


def _checked(fields: CallFields) -> CallBody:
    body = call_body(fields)
    if body.stream:
        raise ContractError(
            "the results of a batch are not streamed: leave stream out", param="body.stream"
        )
    return body


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
