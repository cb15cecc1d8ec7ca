"""Answers requests for models: keys, tenants, targets, limits, request ids, errors."""

import asyncio
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import msgspec
import structlog

from services.gateway.admission import admission
from services.gateway.answer_headers import answer_headers
from services.gateway.body import Forwarded
from services.gateway.call import Call
from services.gateway.claims import claim_of
from services.gateway.edge.announced import announce_stream
from services.gateway.edge.forms import form_of
from services.gateway.errors import error_info
from services.gateway.headers import MESH_REQUEST_ID, REQUEST_ID, Hints, headers_in
from services.gateway.outcomes import Outcome, outcome_of
from services.gateway.pass_through import PassThrough
from services.gateway.requests.deferred import Deferred
from services.gateway.requests.ids import call_id_of
from services.gateway.response import Response
from services.gateway.slo import requested_slo
from services.gateway.state import Gateway
from shared.api.calls import (
    IGNORED_FIELDS,
    MOST_TOKEN_BYTES,
    OWN_FIELDS,
    CallBody,
    CallFields,
    call_body,
    call_fields,
    check_text,
    truncates,
)
from shared.api.digests import call_digest
from shared.api.ranges import check_ranges
from shared.contracts.base import Seconds, TenantId
from shared.contracts.ends import accepted_ends
from shared.contracts.errors import MeshError
from shared.contracts.ingress import InferenceRequest
from shared.contracts.models import ModelEntry
from shared.contracts.requests import ErrorInfo
from solver.tenants.claims import grant

log = structlog.get_logger()

LAST_WORD_S: Seconds = 5.0
"""Time in which a client whose time limit has passed must take its error."""
TEXTS = ("prompt", "input")
"""Fields whose text is the prompt."""
ROUTES: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/pooling": "pooling",
    "/classify": "classify",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
}
"""Path of a route that engines answer -> label of metrics."""


class Door:
    """
    ASGI application that checks requests and passes them to engines of their model.

    Args:
        gateway: Components that all requests share.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._passing = PassThrough(gateway.producer)
        self._deferred = Deferred(gateway)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one POST request to a route in `ROUTES`."""
        headers = headers_in(scope)
        call_id = f"req-{uuid4().hex}"
        response = Response(send, call_id, headers.get(REQUEST_ID), form_of(scope["path"]))
        logged = log.bind(request_id=call_id, endpoint=ROUTES[scope["path"]])
        outcome = Outcome.CANCELLED
        try:
            outcome = await self._answered(scope, receive, response, call_id)
        except MeshError as error:
            outcome = await response.fail(error_info(error))
            logged.info("request.refused", error=str(error))
        except Exception as error:
            logged.exception("request.broken")
            outcome = await response.fail(error_info(error))
        finally:
            self._gateway.metrics.requests.labels(ROUTES[scope["path"]], outcome.value).inc()

    async def _answered(
        self,
        scope: dict[str, Any],
        receive: Any,
        response: Response,
        call_id: str,
    ) -> Outcome:
        gateway = self._gateway
        with admission(gateway, scope) as admitted:
            tenant, hints = admitted.tenant, admitted.hints
            is_stored = hints.needs_store(scope["path"])
            if is_stored:
                gateway.usable_store()
                call_id = call_id_of(tenant, hints.idempotency_key)
                response.add_headers({MESH_REQUEST_ID: call_id})
            raw = await admitted.body(receive)
            fields = call_fields(raw)
            body = call_body(fields)
            ref = gateway.registry.resolve(body.model, call_id)
            call = self._call(body, hints, tenant, call_id)
            if is_stored:
                call.digest = call_digest(scope["path"], raw)
            ref = gateway.fallbacks.chosen(
                body.model,
                ref,
                slo=call.slo,
                importance=call.importance,
                arrived_at=call.arrived_at,
                num_bytes=len(raw),
            )
            if ref.name != body.model:
                call.model = ref.name
                fields["model"] = msgspec.Raw(msgspec.json.encode(ref.name))
            if not (entry := gateway.registry.entry(ref.base)).takes_bodies:
                _check(scope["path"], fields, entry)
            response.call = call
            response.add_headers(answer_headers(gateway, tenant, call.clamped))
            if call.stream:
                announce_stream(scope, response.headers)
            forwarded = Forwarded(
                scope,
                receive,
                _forwarded(raw, fields, body.model, ref.name),
                on_left=response.left,
            )
            limit_s = hints.limit_s(gateway.settings.request_timeout_s)
            answerer = self._deferred if hints.is_deferred(scope["path"]) else self._passing
            outcome = await self._run(answerer, call, forwarded, response, limit_s)
            self._answered_call(call, outcome)
            return outcome

    def _answered_call(self, call: Call, outcome: Outcome) -> None:
        """Count and log a call that has ended."""
        now = self._gateway.clock.now()
        self._gateway.metrics.observe(call, outcome, now=now)
        log.info(
            "request.answered",
            request_id=call.call_id,
            outcome=outcome.value,
            tenant=call.tenant,
            model=call.model,
            stream=call.stream,
            e2e_s=now - call.arrived_at,
        )

    async def _run(
        self,
        answerer: PassThrough | Deferred,
        call: Call,
        request: Forwarded,
        response: Response,
        limit_s: Seconds,
    ) -> Outcome:
        """Let *answerer* answer *call*, for at most *limit_s*."""
        try:
            async with asyncio.timeout(limit_s):
                path = request.scope["path"]
                await answerer.answer(call, path, request.receive, response.send)
        except TimeoutError:
            return await self._timed_out(response, limit_s)
        return response.outcome()

    async def _timed_out(self, response: Response, limit_s: Seconds) -> Outcome:
        """End the response of a call whose time limit has passed."""
        message = f"no complete answer within {limit_s:g} s"
        info = ErrorInfo(message=message, code="timeout", status=504)
        try:
            async with asyncio.timeout(LAST_WORD_S):
                return await response.fail(info)
        except TimeoutError:
            # The client does not read its answer: the call must not hold a slot of its tenant, nor
            # its requests in the mesh, for as long as the client stays.
            return outcome_of(info)

    def _call(self, body: CallBody, hints: Hints, tenant: TenantId, call_id: str) -> Call:
        """
        Fields of the call that the mesh needs.

        Raises:
            ContractError: A target, an end or the service tier is invalid, or the policy of the
                tenant refuses them.
        """
        gateway = self._gateway
        arrived_at = gateway.clock.now()
        targets = InferenceRequest(
            model=body.model,
            slo=requested_slo(body, hints, gateway.settings),
            importance=hints.importance or body.importance,
            service_tier=body.service_tier,
            priority=-(body.priority or 0) if hints.priority is None else hints.priority,
        )
        claim = claim_of(
            targets, body, hints, limits=gateway.settings.limits, arrived_at=arrived_at
        )
        allowed = grant(claim, gateway.tenants.policy(tenant), tenant)
        return Call(
            call_id=call_id,
            model=body.model,
            tenant=tenant,
            arrived_at=arrived_at,
            slo=allowed.slo,
            ends=accepted_ends(body, now=arrived_at),
            importance=allowed.importance,
            stream=bool(body.stream),
            priority=allowed.priority,
            clamped=allowed.clamps,
            application=hints.application or body.application,
            session=hints.session or body.session,
            trace=hints.trace,
        )


def _check(path: str, fields: CallFields, entry: ModelEntry) -> None:
    """
    Check what engines of the mesh would refuse: ranges, and texts that exceed the context.

    Raises:
        ContractError: A field is out of its range, or a text is too long.
    """
    check_ranges(path, fields)
    for name in () if truncates(fields) else TEXTS:
        check_text(name, fields.get(name), entry.max_model_len * MOST_TOKEN_BYTES)


def _forwarded(raw: bytes, fields: CallFields, asked: str, model: str) -> bytes:
    """The body for engines of *model*, without the mesh's fields."""
    dropped = {"priority", *OWN_FIELDS, *IGNORED_FIELDS} & fields.keys()
    if not dropped and asked == model:
        return raw
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in dropped})
