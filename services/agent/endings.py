"""Outcomes of requests that leave the agent; each outcome ends with an acknowledgement."""

from collections.abc import Awaitable, Callable

import msgspec
import structlog

from services.agent.outbox import Outbox
from services.agent.state import AgentState, Pulled, Run, SwappedOut
from shared.broker.protocol import Settlement
from shared.contracts.base import RequestId
from shared.contracts.checks import prompt_text
from shared.contracts.lanes import LaneKey, relegated_name
from shared.contracts.requests import (
    ErrorInfo,
    FinishReason,
    QueuedRequest,
    RequestCompleted,
    RequestFailed,
    Timings,
    Usage,
)
from shared.contracts.telemetry import RequestObserved
from shared.runtime.clock import Clock

log = structlog.get_logger()

CANCELLED_ERROR = ErrorInfo(
    message="the request was cancelled", type="cancelled", code="cancelled", status=499
)
Observe = Callable[[RequestObserved], Awaitable[None]]


class Endings:
    """
    Completes, fails, relegates, evicts and hands back requests.

    Args:
        outbox: Publishes messages.
        engine: Backend name, written into final replies and observations.
        device: Device name, written into final replies and observations.
        observe: Receives one observation per finished request.
        evict_hold_s: Time after an eviction in which this instance does not pull from the request's
            resume queue.
        swap_lease_s: Time after which a swapped-out request that has not run again is evicted.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        outbox: Outbox,
        clock: Clock,
        engine: str,
        device: str,
        observe: Observe,
        evict_hold_s: float,
        swap_lease_s: float,
    ) -> None:
        self._state = state
        self._outbox = outbox
        self._clock = clock
        self._engine = engine
        self._device = device
        self._observe = observe
        self._evict_hold_s = evict_hold_s
        self.swap_lease_s = swap_lease_s

    async def complete(self, run: Run, *, prompt_tokens: int) -> None:
        """Deliver a final reply with the whole answer."""
        request, now = run.request, self._clock.now()
        verdict = run.answer.verdict(finished_at=now)
        final = RequestCompleted(
            request_id=request.request_id,
            run_id=run.run_id,
            instance_id=self._state.instance_id,
            model=request.model.name,
            token_ids=(),
            text="",
            finish_reason=run.answer.finish_reason or FinishReason.STOP,
            usage=Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=run.answer.num_tokens,
                total_tokens=prompt_tokens + run.answer.num_tokens,
                cached_tokens=run.answer.cached_tokens,
            ),
            timings=Timings(
                arrived_at=request.arrived_at,
                grouped_at=request.grouped_at,
                pulled_at=run.pulled.pulled_at,
                submitted_at=run.submitted_at,
                first_token_at=run.answer.first_token_at or now,
                finished_at=now,
                predicted_wait=request.predicted_wait,
            ),
            verdict=verdict,
            attempts=request.attempts,
            engine=self._engine,
        )
        await self._outbox.final(request.reply_to, run.answer.written_into(final))
        await self._settle(run.pulled, "completed")
        totals = self._state.totals
        totals.completed += 1
        totals.prompt_tokens += prompt_tokens
        totals.output_tokens += run.answer.num_tokens
        await self._observed(
            run.pulled,
            run,
            outcome="completed",
            attained=verdict.attained,
            counted_tokens=prompt_tokens,
        )
        log.info(
            "request.completed",
            request_id=request.request_id,
            model=request.model.base,
            tenant=request.tenant,
            ttft_s=round((run.answer.first_token_at or now) - request.arrived_at, 4),
            ttlt_s=round(now - request.arrived_at, 4),
            output_tokens=run.answer.num_tokens,
            attained=verdict.attained,
            hop=request.attempts.hop,
        )

    async def fail(
        self, pulled: Pulled, error: ErrorInfo, *, run: Run | None = None, dead_letter: bool = True
    ) -> None:
        """
        Deliver a final reply with an error.

        With *dead_letter*, also copy the request to the dead letters.
        """
        request = pulled.request
        final = RequestFailed(
            request_id=request.request_id,
            run_id=run.run_id if run else None,
            error=error,
            at=self._clock.now(),
        )
        await self._outbox.final(request.reply_to, final)
        if dead_letter:
            await self._outbox.dead_letter(request, error)
        await self._settle(pulled, f"failed: {error.code}")
        self._state.totals.failed += 1
        await self._observed(pulled, run, outcome=error.code, attained=False)
        log.info("request.failed", request_id=request.request_id, code=error.code)

    async def stop(self, pulled: Pulled) -> None:
        """End a run that its producer no longer needs, without a final reply."""
        await self._settle(pulled, "stopped by its producer")
        log.info("run.stopped", request_id=pulled.request.request_id)

    async def relegate(self, pulled: Pulled) -> None:
        """
        Relegate a request: the request loses its SLO and waits for room in the relegated queue.
        """
        attempts = msgspec.structs.replace(
            pulled.request.attempts, relegated=True, hop=pulled.request.attempts.hop + 1
        )
        request = msgspec.structs.replace(pulled.request, attempts=attempts)
        await self._outbox.queue(relegated_name(request.model.base), request)
        await self._settle(pulled, "relegated")
        self._state.totals.relegated += 1
        log.info("request.relegated", request_id=request.request_id)

    async def hand_back(self, pulled: Pulled) -> None:
        """Return a request that has not run on this instance to the front of its lane."""
        attempts = msgspec.structs.replace(
            pulled.request.attempts, hop=pulled.request.attempts.hop + 1
        )
        await self._requeue(
            pulled, msgspec.structs.replace(pulled.request, attempts=attempts), "handed back"
        )

    async def evict(self, run: Run) -> None:
        """
        Requeue a request with its progress; for some time, this instance does not pull the request.
        """
        run.pulled.request = with_progress(run)
        await self.evict_waiting(run.pulled)

    async def evict_waiting(self, pulled: Pulled) -> None:
        """Evict a swapped-out request, whose message already contains the request's progress."""
        request, now = pulled.request, self._clock.now()
        attempts = msgspec.structs.replace(
            request.attempts,
            hop=request.attempts.hop + 1,
            evictions=request.attempts.evictions + 1,
            evicted_by=self._state.instance_id,
            evicted_at=now,
        )
        self._state.order.hold(return_queue(request), now + self._evict_hold_s)
        await self._requeue(pulled, msgspec.structs.replace(request, attempts=attempts), "evicted")
        self._state.totals.evicted += 1
        log.info(
            "request.evicted",
            request_id=request.request_id,
            tokens=request.progress.num_tokens,
        )

    async def swap_out(self, run: Run) -> None:
        """
        Keep the unacknowledged request of a run that was removed from the engine, with its
        progress.

        The request's hop stays the same, since no other instance may run the request. A request
        that this instance could not resume is evicted instead.
        """
        state, now = self._state, self._clock.now()
        if run.request.reply_to is not None:
            await self._outbox.flush(run.request.reply_to)
        if (run.request.request_id, run.request.reply_to) in state.cancelled:
            await self.fail(run.pulled, CANCELLED_ERROR, run=run, dead_letter=False)
            return
        if state.draining or state.swapping or run.request.model.base != state.model:
            await self.evict(run)
            return
        run.pulled.request = request = with_progress(run)
        run.kept = True
        state.swap_out(
            SwappedOut(
                pulled=run.pulled,
                context_tokens=request.prompt_tokens + run.answer.num_tokens,
                lease_until=now + self.swap_lease_s,
                resume_at=now + run.rest_s,
            )
        )
        if run.rest_s == 0.0:
            state.unrest(request.request_id)
        state.totals.swapped_out += 1
        log.info("request.swapped_out", request_id=request.request_id, tokens=run.answer.num_tokens)

    async def crashed(self, run: Run) -> None:
        """Requeue a request after an engine crash, and increment the request's crash count."""
        attempts = msgspec.structs.replace(
            run.request.attempts,
            hop=run.request.attempts.hop + 1,
            crashes=run.request.attempts.crashes + 1,
        )
        request = msgspec.structs.replace(with_progress(run), attempts=attempts)
        await self._requeue(run.pulled, request, "returned when the engine died")

    async def _requeue(self, pulled: Pulled, request: QueuedRequest, how: str) -> None:
        # This instance may pull the requeued message next. It must not merge that message into the
        # old copy, which is leaving.
        pulled.leaving = True
        if request.reply_to is not None:
            await self._outbox.flush(request.reply_to)
        await self._outbox.queue(return_queue(request), request)
        await self._settle(pulled, how)

    async def _settle(self, pulled: Pulled, how: str) -> None:
        while pulled.deliveries:
            await pulled.deliveries.pop().settle(Settlement.ACK)
        pulled.leaving = True
        self._state.depart(pulled.request.request_id, how)

    async def _observed(
        self,
        pulled: Pulled,
        run: Run | None,
        *,
        outcome: str,
        attained: bool,
        counted_tokens: int | None = None,
    ) -> None:
        request = pulled.request
        num_tokens = run.answer.num_tokens if run else 0
        await self._observe(
            RequestObserved(
                request_id=RequestId(request.request_id),
                instance_id=self._state.instance_id,
                model=request.model.base,
                engine=self._engine,
                device=self._device,
                application=request.application,
                tenant=request.tenant,
                qos_class=request.slo.qos_class,
                prompt_tokens=counted_tokens or request.prompt_tokens,
                # The mean of a call's answers: lengths of single answers are predicted from it.
                output_tokens=num_tokens // request.num_answers,
                arrived_at=request.arrived_at,
                pulled_at=pulled.pulled_at,
                submitted_at=run.submitted_at if run else 0.0,
                first_token_at=(run.answer.first_token_at or 0.0) if run else 0.0,
                finished_at=self._clock.now(),
                attained=attained,
                outcome=outcome,
                evictions=request.attempts.evictions,
                crashes=request.attempts.crashes,
                cached_tokens=run.answer.cached_tokens if run else 0,
                relegated=request.attempts.relegated,
                max_tbt_s=run.answer.max_tbt_s if run else 0.0,
                prompt_text=prompt_text(request) if counted_tokens else None,
                finish_reason=run.answer.finish_reason if run else None,
                max_tokens=request.sampling.max_tokens // request.num_answers,
                ignore_eos=request.sampling.ignore_eos,
                grouped_at=request.grouped_at,
                predicted_wait=request.predicted_wait,
            )
        )


def with_progress(run: Run) -> QueuedRequest:
    """Copy of the request with the run's progress, from which another run can resume."""
    return msgspec.structs.replace(run.request, progress=run.answer.progress())


def return_queue(request: QueuedRequest) -> str:
    """
    Queue in which an interrupted request waits to run again, ahead of the requests in its lane.
    """
    if request.attempts.relegated:
        return relegated_name(request.model.base)
    return LaneKey.parse(request.lane).resume_name
