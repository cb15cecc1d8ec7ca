"""ASGI layer around models' applications: keys, tenants, targets, limits, request ids, errors."""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import msgspec
import structlog

from services.gateway.admission import admission
from services.gateway.answer_headers import answer_headers
from services.gateway.body import Forwarded
from services.gateway.call import Call, current
from services.gateway.claims import claim_of
from services.gateway.edge.announced import announce_stream
from services.gateway.edge.forms import form_of
from services.gateway.errors import error_info
from services.gateway.headers import MESH_REQUEST_ID, REQUEST_ID, Hints, headers_in
from services.gateway.outcomes import Outcome, outcome_of
from services.gateway.pass_through import PassThrough
from services.gateway.render_slots import RenderSlots
from services.gateway.requests.deferred import Deferred
from services.gateway.requests.ids import call_id_of
from services.gateway.response import Response
from services.gateway.slo import requested_slo
from services.gateway.state import Gateway
from shared.api.calls import (
    ENDPOINTS,
    IGNORED_FIELDS,
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
from shared.contracts.base import ModelName, Seconds, TenantId
from shared.contracts.ends import accepted_ends
from shared.contracts.errors import MeshError
from shared.contracts.ingress import InferenceRequest
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
"""Path of an open route of vLLM's application -> label of metrics. All other routes are closed."""


class Door:
    """
    ASGI application that passes requests to the application of their model.

    Args:
        gateway: Components that all requests share.
        applications: Application of each base model: vLLM's, or one that passes bodies to servers.
        prepare: Called with the model before its application reads a request.
        most_chars: Number of characters that fit into a model's context.
    """

    def __init__(
        self,
        gateway: Gateway,
        applications: Mapping[ModelName, Any],
        prepare: Callable[[ModelName], object] = lambda _model: None,
        most_chars: Callable[[ModelName], float] = lambda _model: math.inf,
    ) -> None:
        self._gateway = gateway
        self._applications = applications
        self._prepare, self._most_chars = prepare, most_chars
        self._passing = PassThrough(gateway.producer)
        self._deferred = Deferred(gateway)
        settings = gateway.settings
        self._rendering = RenderSlots(
            slots=settings.max_rendering, max_waiting=settings.max_waiting_to_render
        )

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
            failure = None if response.call is None else response.call.failure
            if failure is None:
                logged.exception("request.broken")
            # VLLM's stream of Responses breaks off when a request fails.
            outcome = await response.fail(failure or error_info(error))
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
            base = ref.base
            if not gateway.registry.entry(base).takes_bodies:
                check_ranges(scope["path"], fields)
            for name in () if truncates(fields) else TEXTS:
                check_text(name, fields.get(name), self._most_chars(base))
            application = self._application(base, call, hints, scope["path"])
            self._prepare(base)
            response.call = call
            response.add_headers(answer_headers(gateway, tenant, call.clamped))
            if call.stream:
                announce_stream(scope, response.headers)
            forwarded = Forwarded(
                scope,
                receive,
                _forwarded(raw, fields, body.model, ref.name),
                on_left=response.left,
                request_id=None if call.digest is None else call_id,
            )
            limit_s = hints.limit_s(gateway.settings.request_timeout_s)
            async with self._rendering.slot(tenant) as call.rendered:
                outcome = await self._run(application, call, forwarded, response, limit_s)
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

    def _application(self, base: ModelName, call: Call, hints: Hints, path: str) -> Any:
        """
        The application of a call.

        The whole answer of a call that may be repeated is made by the engine host, so that all
        repeats get it as it is; vLLM's application would give it another id and time each time.
        """
        own = self._applications[base]
        if hints.is_deferred(path):
            return self._deferred
        is_whole = path in ENDPOINTS and not call.stream
        return self._passing if call.digest is not None and is_whole else own

    async def _run(
        self,
        application: Any,
        call: Call,
        request: Forwarded,
        response: Response,
        limit_s: Seconds,
    ) -> Outcome:
        """Run the model's application in the context of *call*, for at most *limit_s*."""
        token = current.set(call)
        try:
            async with asyncio.timeout(limit_s):
                await application(request.scope, request.receive, response.send)
        except TimeoutError:
            return await self._timed_out(response, limit_s)
        finally:
            current.reset(token)
            await call.end()
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


def _forwarded(raw: bytes, fields: CallFields, asked: str, model: str) -> bytes:
    """The body for vLLM's application of *model*, without the mesh's fields."""
    dropped = {"priority", *OWN_FIELDS, *IGNORED_FIELDS} & fields.keys()
    if not dropped and asked == model:
        return raw
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in dropped})
