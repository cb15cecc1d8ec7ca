"""ASGI layer around vLLM's applications: keys, tenants, targets, limits, request ids and errors."""

import asyncio
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import msgspec
import structlog

from services.gateway.errors import error_info
from services.gateway.headers import REQUEST_ID, Hints, parse_hints
from services.gateway.openai import MAX_PRIORITY
from services.gateway.outcomes import Outcome
from services.gateway.slo import requested_slo
from services.gateway.state import Gateway
from services.gateway.vllm.call import Call, current
from services.gateway.vllm.response import Response
from shared.contracts.base import ModelName, TenantId
from shared.contracts.checks import effective_importance, effective_slo
from shared.contracts.errors import ContractError, MeshError, TransientError
from shared.contracts.ingress import InferenceRequest, Label, RequestedSlo
from shared.contracts.qos import Importance
from shared.contracts.requests import ErrorInfo

log = structlog.get_logger()

ROUTES: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
"""Path of an open route of vLLM's application -> label of metrics. All other routes are closed."""
OWN_FIELDS = ("slo", "deadline", "importance", "application")
REFUSED_FIELDS = ("kv_transfer_params", "vllm_xargs", "session_id", "data_parallel_rank")
"""Fields of vLLM's bodies that would control the engine."""


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request body that the mesh reads; vLLM's application reads the others."""

    model: str
    stream: bool | None = None
    priority: int | None = None
    """As in vLLM, lower values are served first."""
    service_tier: str | None = None
    slo: RequestedSlo | None = None
    deadline: float | None = None
    importance: Importance | None = None
    application: Label | None = None


class Door:
    """
    ASGI application that passes requests to the vLLM application of their model.

    Args:
        gateway: Components that all requests share.
        applications: vLLM's application of each base model.
    """

    def __init__(self, gateway: Gateway, applications: Mapping[ModelName, Any]) -> None:
        self._gateway = gateway
        self._applications = applications

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer one POST request to a route in `ROUTES`."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        call_id = f"req-{uuid4().hex}"
        response = Response(send, call_id, headers.get(REQUEST_ID))
        logged = log.bind(request_id=call_id, endpoint=ROUTES[scope["path"]])
        outcome = Outcome.CANCELLED
        try:
            outcome = await self._answered(scope, receive, headers, response, call_id)
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
        headers: dict[str, str],
        response: Response,
        call_id: str,
    ) -> Outcome:
        gateway = self._gateway
        if gateway.stop.is_set():
            raise TransientError("this gateway is shutting down")
        tenant = gateway.tenants.authenticate(headers.get("authorization") or _api_key(headers))
        hints = parse_hints(headers)
        tenant = gateway.tenants.effective(tenant, hints)
        with gateway.tenants.slot(tenant):
            raw = await self._read(receive)
            fields = _decoded(raw)
            body = _converted(fields)
            call = self._call(body, hints, tenant, call_id)
            application = self._applications[gateway.registry.resolve(body.model).base]
            response.call = call
            forwarded = Forwarded(scope, receive, _forwarded(raw, fields))
            return await self._run(application, call, forwarded, response)

    async def _run(
        self, application: Any, call: Call, request: "Forwarded", response: Response
    ) -> Outcome:
        """Run vLLM's application in the context of *call*."""
        limit_s = self._gateway.settings.request_timeout_s
        token = current.set(call)
        try:
            async with asyncio.timeout(limit_s):
                await application(request.scope, request.receive, response.send)
        except TimeoutError:
            message = f"no complete answer within {limit_s:g} s"
            return await response.fail(ErrorInfo(message=message, code="timeout", status=504))
        finally:
            current.reset(token)
        return response.outcome()

    def _call(self, body: Body, hints: Hints, tenant: TenantId, call_id: str) -> Call:
        """
        Fields of the call that the mesh needs.

        Raises:
            ContractError: A target, the priority or the service tier is invalid.
        """
        gateway = self._gateway
        arrived_at = gateway.clock.now()
        priority = -(body.priority or 0) if hints.priority is None else hints.priority
        if abs(priority) > MAX_PRIORITY:
            raise ContractError(
                f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
            )
        targets = InferenceRequest(
            model=body.model,
            slo=requested_slo(body, hints, gateway.settings),
            importance=hints.importance or body.importance,
            service_tier=body.service_tier,
        )
        return Call(
            call_id=call_id,
            model=body.model,
            tenant=tenant,
            arrived_at=arrived_at,
            slo=effective_slo(targets, now=arrived_at, limits=gateway.settings.limits),
            importance=effective_importance(targets),
            stream=bool(body.stream),
            priority=priority,
            application=hints.application or body.application,
            traceparent=hints.traceparent,
        )

    async def _read(self, receive: Any) -> bytes:
        """
        Read the body.

        Raises:
            ContractError: The body is too large or too slow, or the client disconnected.
        """
        limit = self._gateway.settings.limits.max_body_bytes
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self._gateway.settings.body_timeout_s):
                while more:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise ContractError("the client disconnected", code="cancelled", status=499)
                    parts.append(event.get("body", b""))
                    size += len(parts[-1])
                    more = event.get("more_body", False)
                    if size > limit:
                        raise ContractError(
                            f"the body is too large: the limit is {limit} bytes",
                            code="body_too_large",
                            status=413,
                        )
        except TimeoutError:
            raise ContractError(
                "the body did not arrive in time", code="body_timeout", status=408
            ) from None
        return b"".join(parts)


def _api_key(headers: Mapping[str, str]) -> str | None:
    """The key in Anthropic's header, in the form of an `Authorization` header."""
    key = headers.get("x-api-key")
    return None if key is None else f"Bearer {key}"


def _decoded(raw: bytes) -> dict[str, Any]:
    """
    Decode a body, whose fields vLLM's application checks.

    Raises:
        ContractError: The body is not a JSON object, or has a field that would control the engine.
    """
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ContractError("the body must be a JSON object", code="invalid_json")
    for name in REFUSED_FIELDS:
        if fields.get(name) is not None:
            raise ContractError(
                f"{name} is not supported", code="unsupported_parameter", param=name
            )
    return fields


def _converted(fields: dict[str, Any]) -> Body:
    try:
        return msgspec.convert(fields, Body)
    except msgspec.ValidationError as error:
        text = str(error)
        param = text.rpartition("`$.")[2].rstrip("`") if "`$." in text else None
        raise ContractError(text, param=param) from error


def _forwarded(raw: bytes, fields: dict[str, Any]) -> bytes:
    """The body for vLLM's application, without the mesh's fields."""
    dropped = {"priority", *OWN_FIELDS} & fields.keys()
    if not dropped:
        return raw
    return msgspec.json.encode({k: v for k, v in fields.items() if k not in dropped})


class Forwarded:
    """Request for vLLM's application: the body in one part, followed by the client's events."""

    def __init__(self, scope: dict[str, Any], receive: Any, body: bytes) -> None:
        headers = [each for each in scope["headers"] if each[0] != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        self.scope = {**scope, "headers": [*headers, length]}
        self._receive = receive
        self._body: bytes | None = body

    async def receive(self) -> Any:
        """The next ASGI event."""
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
