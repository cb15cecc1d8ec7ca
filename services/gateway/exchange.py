"""Processing of one HTTP request, from its headers to the last byte of its answer."""

import asyncio
from uuid import uuid4

import msgspec
import structlog
from litestar.connection import Request
from litestar.datastructures import State
from litestar.exceptions import HTTPException, InternalServerException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.types import Send

from services.gateway.answer_headers import answer_headers
from services.gateway.answering import Answering
from services.gateway.channel import Channel
from services.gateway.disconnect import cancelled_on_disconnect
from services.gateway.door import authorization, peer_of
from services.gateway.errors import error_info
from services.gateway.headers import REQUEST_ID, Hints, parse_hints
from services.gateway.intake import Accepted
from services.gateway.outcomes import Outcome, outcome_of
from services.gateway.replies import Renderer
from services.gateway.requests.deferred import accept, refuse_stream
from services.gateway.requests.ids import call_id_of
from services.gateway.shapes import Endpoint
from services.gateway.state import Gateway
from shared.api.digests import call_digest
from shared.contracts.base import TenantId
from shared.contracts.errors import ContractError, MeshError, TransientError
from shared.contracts.requests import ReplyMode

log = structlog.get_logger()

MESH_REQUEST_ID = "x-headway-request-id"


class Exchange:
    """
    Processes one HTTP request: authentication, slot of the tenant, body, checks, publish, answer.

    At the end, the outcome is counted and logged.

    Args:
        gateway: Components that all requests share.
        endpoint: API of the request.
        request: Request whose body has not been read.
    """

    def __init__(
        self, gateway: Gateway, endpoint: Endpoint, request: Request[object, object, State]
    ) -> None:
        self._gateway = gateway
        self._endpoint = endpoint
        self._request = request
        self._headers = dict(request.headers.items())
        self._id = f"req-{uuid4().hex}"
        """
        Id of the request in the mesh.

        The id that the client sends is only echoed, since several clients may send the same id.
        """
        self._log = log.bind(request_id=self._id, endpoint=endpoint.name)

    async def run(self, send: Send) -> None:
        """Answer the request; an error is also sent as an answer."""
        headers = {MESH_REQUEST_ID: self._id}
        if client_id := self._headers.get(REQUEST_ID):
            headers[REQUEST_ID] = client_id
            self._log = self._log.bind(client_request_id=client_id[:128])
        channel = Channel(send, headers)
        outcome = Outcome.CANCELLED
        try:
            outcome = await self._checked(channel)
        except (MeshError, HTTPException) as error:
            info = error_info(error)
            outcome = outcome_of(info)
            self._log.info("request.refused", code=info.code, status=info.status)
            await channel.error(info)
        except Exception as error:  # noqa: BLE001  the client gets an answer, the log the rest
            outcome = Outcome.FAILED
            self._log.exception("request.broken")
            if not channel.started:
                await channel.error(error_info(error))
        finally:
            self._gateway.metrics.requests.labels(self._endpoint.name, outcome.value).inc()

    async def _checked(self, channel: Channel) -> Outcome:
        gateway = self._gateway
        if gateway.stop.is_set():
            raise TransientError("this gateway is shutting down")
        tenant = gateway.tenants.authenticate(
            authorization(self._headers),
            headers=self._headers,
            peer=peer_of(self._request.scope),
        )
        hints = parse_hints(self._headers)
        tenant = gateway.tenants.effective(tenant, hints)
        is_stored = hints.needs_store(self._endpoint.path)
        if is_stored:
            gateway.usable_store()
            self._id = call_id_of(tenant, hints.idempotency_key)
            self._log = self._log.bind(request_id=self._id)
            channel.add_headers({MESH_REQUEST_ID: self._id})
        with gateway.tenants.slot(tenant):
            raw = await self._body()
            # The arrival time is read before the thread starts: the wait for a thread counts as
            # waiting time of the request.
            arrived_at = gateway.clock.now()
            # Tokenizing a large prompt takes long, and heartbeats must continue.
            accepted = await asyncio.to_thread(
                gateway.intake.accept,
                raw,
                self._endpoint.body_type,
                hints=hints,
                tenant=tenant,
                request_id=self._id,
                arrived_at=arrived_at,
            )
            channel.add_headers(answer_headers(gateway, tenant, accepted.ingress.clamped))
            digest = call_digest(self._endpoint.path, raw) if is_stored else None
            if digest is not None and hints.is_deferred(self._endpoint.path):
                return await self._deferred(accepted, hints, digest, channel)
            return await self._answered(accepted, hints, tenant, channel, digest)

    async def _deferred(
        self, accepted: Accepted, hints: Hints, digest: str, channel: Channel
    ) -> Outcome:
        """Accept the request, whose answer the client collects later."""
        refuse_stream(is_streamed=accepted.stream)
        answer = await accept(
            self._gateway,
            accepted.ingress,
            endpoint=self._endpoint.path,
            digest=digest,
            traceparent=hints.traceparent,
        )
        body = msgspec.json.encode(answer.body)
        await channel.json(body, status=answer.status, headers=answer.headers)
        return Outcome.COMPLETED

    async def _answered(
        self,
        accepted: Accepted,
        hints: Hints,
        tenant: TenantId,
        channel: Channel,
        digest: str | None,
    ) -> Outcome:
        gateway = self._gateway
        generation = await gateway.producer.submit(
            accepted.ingress,
            reply=ReplyMode.STREAM if accepted.stream else ReplyMode.FINAL,
            traceparent=hints.traceparent,
            digest=digest,
        )
        answering = Answering(
            accepted=accepted,
            renderer=Renderer(
                self._endpoint,
                request_id=self._id,
                model=accepted.ingress.model,
                created=int(accepted.arrived_at),
                include_usage=accepted.include_usage,
            ),
            channel=channel,
            metrics=gateway.metrics,
            clock=gateway.clock,
            timeout_s=min(
                hints.timeout_s or gateway.settings.request_timeout_s,
                gateway.settings.request_timeout_s,
            ),
        )
        async with cancelled_on_disconnect(self._request.receive, generation):
            outcome = await answering.answer(generation)
        self._log.info(
            "request.answered",
            outcome=outcome.value,
            tenant=tenant,
            model=accepted.ingress.model,
            stream=accepted.stream,
            prompt_tokens=accepted.ingress.prompt_tokens,
            ttft_s=answering.ttft_s,
            e2e_s=gateway.clock.now() - accepted.arrived_at,
        )
        return outcome

    async def _body(self) -> bytes:
        limits = self._gateway.settings.limits
        try:
            async with asyncio.timeout(self._gateway.settings.body_timeout_s):
                return await self._request.body()
        except RequestEntityTooLarge:
            raise ContractError(
                f"the body is too large: the limit is {limits.max_body_bytes} bytes",
                code="body_too_large",
                status=413,
            ) from None
        except InternalServerException:
            # Litestar's exception for a client that disconnects during the upload.
            raise ContractError("the client disconnected", code="cancelled", status=499) from None
        except TimeoutError:
            raise ContractError(
                "the body did not arrive in time", code="body_timeout", status=408
            ) from None
