"""Writes an answer to the HTTP response, streamed or as one body."""

import asyncio
from dataclasses import dataclass

from services.gateway.channel import Channel
from services.gateway.errors import error_info
from services.gateway.intake import Accepted
from services.gateway.metrics import GatewayMetrics
from services.gateway.outcomes import Outcome, outcome_of
from services.gateway.replies import Renderer, sse_error
from shared.contracts.qos import Slo
from shared.contracts.requests import ErrorInfo, Final, RequestCompleted
from shared.producer.generation import Generation, RunDivergedError
from shared.runtime.clock import Clock

LAST_WORD_S = 5.0


@dataclass(slots=True, kw_only=True)
class Answering:
    """
    Sends the answer of one request.

    The status line of a stream is sent with the first token, so that an earlier error gets its own
    HTTP status. A later error is the last event of the stream, without [DONE].
    """

    accepted: Accepted
    renderer: Renderer
    channel: Channel
    metrics: GatewayMetrics
    clock: Clock
    timeout_s: float
    ttft_s: float | None = None
    """
    Time from the arrival of the request at this gateway to its first token; None before that token.
    """

    async def answer(self, generation: Generation) -> Outcome:
        """Send the answer of *generation* to the client; return the outcome of the request."""
        try:
            async with asyncio.timeout(self.timeout_s):
                if self.accepted.stream:
                    with self.metrics.streams_open.track_inprogress():
                        final = await self._stream(generation)
                else:
                    final = await self._whole(generation)
        except RunDivergedError as error:
            return await self._failed(error_info(error))
        except TimeoutError:
            return await self._timed_out()
        if isinstance(final, RequestCompleted):
            self._observe(final)
            return Outcome.COMPLETED
        return await self._failed(final.error)

    async def _timed_out(self) -> Outcome:
        info = ErrorInfo(
            message=f"no complete answer within {self.timeout_s:g} s", code="timeout", status=504
        )
        try:
            async with asyncio.timeout(LAST_WORD_S):
                return await self._failed(info)
        except TimeoutError:
            # The client does not read its answer: the stream must not occupy a slot of the tenant
            # forever.
            return outcome_of(info)

    async def _whole(self, generation: Generation) -> Final:
        final = await generation.final()
        if isinstance(final, RequestCompleted):
            # A repeat may arrive after the first token of its request.
            self.ttft_s = max(0.0, final.timings.first_token_at - self.accepted.arrived_at)
            await self.channel.json(self.renderer.whole(final))
        return final

    async def _stream(self, generation: Generation) -> Final:
        async for part in generation:
            event = self.renderer.part(part.text)
            if self.ttft_s is None:
                self.ttft_s = self.clock.now() - self.accepted.arrived_at
                event = self.renderer.opening() + event
            await self.channel.event(event)
        final = await generation.final()
        if isinstance(final, RequestCompleted):
            await self.channel.event(self.renderer.closing(final))
            await self.channel.end()
        return final

    async def _failed(self, info: ErrorInfo) -> Outcome:
        outcome = outcome_of(info)
        if outcome not in (Outcome.CANCELLED, Outcome.REFUSED):
            self.metrics.violated.labels(self._qos_class).inc()
        if self.channel.started:
            await self.channel.event(sse_error(info))
            await self.channel.end()
        else:
            await self.channel.error(info)
        return outcome

    def _observe(self, final: RequestCompleted) -> None:
        qos_class = self._qos_class
        self.metrics.e2e_s.labels(qos_class).observe(self.clock.now() - self.accepted.arrived_at)
        if self.ttft_s is not None:
            self.metrics.ttft_s.labels(qos_class).observe(self.ttft_s)
        verdict = self.metrics.attained if final.verdict.attained else self.metrics.violated
        verdict.labels(qos_class).inc()

    @property
    def _qos_class(self) -> str:
        return (self.accepted.ingress.slo or Slo()).qos_class.value
