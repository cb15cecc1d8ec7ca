"""Processing of one HTTP request, from its headers to the last byte of its answer."""

import asyncio
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import msgspec
import structlog
from litestar.exceptions import HTTPException
from litestar.types import Receive, Send

from services.gateway.admission import admission
from services.gateway.answer_headers import answer_headers
from services.gateway.answering import Answering
from services.gateway.channel import Channel
from services.gateway.disconnect import cancelled_on_disconnect
from services.gateway.edge.announced import announce_stream
from services.gateway.errors import error_info
from services.gateway.headers import MESH_REQUEST_ID, REQUEST_ID, Hints, headers_in, id_headers
from services.gateway.intake import Accepted
from services.gateway.outcomes import Outcome, outcome_of
from services.gateway.replies import Renderer
from services.gateway.requests.deferred import accept, refuse_stream
from services.gateway.requests.ids import call_id_of
from services.gateway.shapes import Endpoint
from services.gateway.state import Gateway
from shared.api.digests import call_digest
from shared.contracts.base import TenantId
from shared.contracts.errors import MeshError
from shared.contracts.requests import ReplyMode

log = structlog.get_logger()


class Exchange:
    """
    Processes one HTTP request: admission, body, checks, publish, answer.

    At the end, the outcome is counted and logged.

    Args:
        gateway: Components that all requests share.
        endpoint: API of the request.
        scope: ASGI scope of the request.
        receive: The `receive` of ASGI.
    """

    def __init__(
        self, gateway: Gateway, endpoint: Endpoint, scope: Mapping[str, Any], receive: Receive
    ) -> None:
        self._gateway = gateway
        self._endpoint = endpoint
        self._scope = scope
        self._receive = receive
        self._id = f"req-{uuid4().hex}"
        """
        Id of the request in the mesh.

        The id that the client sends is only echoed, since several clients may send the same id.
        """
        self._log = log.bind(request_id=self._id, endpoint=endpoint.name)

    async def run(self, send: Send) -> None:
        """Answer the request; an error is also sent as an answer."""
        client_id = headers_in(self._scope).get(REQUEST_ID)
        if client_id:
            self._log = self._log.bind(client_request_id=client_id[:128])
        channel = Channel(send, id_headers(self._id, client_id))
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
        with admission(gateway, self._scope) as admitted:
            tenant, hints = admitted.tenant, admitted.hints
            is_stored = hints.needs_store(self._endpoint.path)
            if is_stored:
                gateway.usable_store()
                self._id = call_id_of(tenant, hints.idempotency_key)
                self._log = self._log.bind(request_id=self._id)
                channel.add_headers({MESH_REQUEST_ID: self._id})
            raw = await admitted.body(self._receive)
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
            trace=hints.trace,
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
        if accepted.stream:
            announce_stream(self._scope, channel.headers)
        generation = await gateway.producer.submit(
            accepted.ingress,
            reply=ReplyMode.STREAM if accepted.stream else ReplyMode.FINAL,
            trace=hints.trace,
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
            timeout_s=hints.limit_s(gateway.settings.request_timeout_s),
        )
        async with cancelled_on_disconnect(self._receive, generation):
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
