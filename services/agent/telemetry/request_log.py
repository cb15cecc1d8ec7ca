"""What is reported about the requests of an instance: log lines, observations, records, spans."""

import msgspec
import structlog

from services.agent.answer import AnswerStream
from services.agent.metrics import COMPLETED
from services.agent.runs import Run
from services.agent.telemetry.reporting import Reporter
from shared.broker.protocol import Delivery
from shared.broker.stories import StoryOutbox
from shared.contracts.base import UnixTime
from shared.contracts.checks import prompt_text
from shared.contracts.requests import QueuedRequest
from shared.contracts.stories.story import PulledRequest, RequeuedRequest, Story, story_of
from shared.contracts.telemetry import RequestObserved
from shared.tracing.spans import Tracer, sampled_trace
from shared.tracing.stays import Stay, record_stay, record_wait
from solver.instance.commands import Completion, Depart, Failure, Requeueing
from solver.instance.state import InstanceSettings

log = structlog.get_logger()


class RequestLog:
    """
    Logs and reports what happens to the requests of one instance.

    Args:
        settings: Constants of the instance.
        reporter: Publishes the observation of each finished request.
        tracer: Exports the waits and stays of requests; None: no traces.
        stories: Takes what operators may ask about requests; None: there are no records.
    """

    def __init__(
        self,
        *,
        settings: InstanceSettings,
        reporter: Reporter,
        tracer: Tracer | None,
        stories: StoryOutbox | None,
    ) -> None:
        self._settings = settings
        self._reporter = reporter
        self._tracer = tracer
        self._stories = stories

    def waited(self, request: QueuedRequest, delivery: Delivery, *, pulled_at: UnixTime) -> None:
        """Report the wait of a pulled request in the queue of *delivery*."""
        if self._tracer is not None:
            record_wait(
                self._tracer,
                request,
                delivery,
                instance_id=self._settings.instance_id,
                pulled_at=pulled_at,
            )

    def held(self, request: QueuedRequest, *, pulled_at: UnixTime) -> None:
        """Report that the instance holds a request from now on."""
        if self._stories is not None:
            pulled = PulledRequest(
                tenant=request.tenant, request_id=request.request_id, at=pulled_at
            )
            self._stories.pulled(pulled)

    async def left(self, command: Depart, run: Run | None, now: UnixTime) -> None:
        """
        Log and report that a request has left the instance, after its outcome was published.

        Args:
            command: The outcome.
            run: The last run of the request; None if it did not run.
            now: Time of the outcome, which its final reply has also.
        """
        request, settings = command.request, self._settings
        num_tokens = run.answer.num_tokens if run is not None else 0
        fields = {
            "request_id": request.request_id,
            "model": request.model.base,
            "tenant": request.tenant,
            "hop": request.attempts.hop,
            "tokens": num_tokens,
        }
        trace = None if self._tracer is None else sampled_trace(request)
        if trace is not None:
            fields["trace_id"] = trace.trace_id
        observed = None
        if not command.publications:
            log.info("run.stopped", **fields)
        for publication in command.publications:
            match publication:
                case Completion() if run is not None:
                    observed = _observation(command, run, now, COMPLETED, settings)
                    log.info(
                        "request.completed",
                        **fields,
                        ttft_s=round((run.answer.first_token_at or now) - request.arrived_at, 4),
                        ttlt_s=round(now - request.arrived_at, 4),
                        attained=observed.attained,
                    )
                    await self._finished(command, run, observed)
                case Failure(error=error):
                    log.info("request.failed", **fields, code=error.code)
                    observed = _observation(command, run, now, error.code, settings)
                    await self._finished(command, run, observed)
                case Requeueing(queue=queue):
                    log.info("request.requeued", **fields, how=command.how, queue=queue)
                    self._requeued(request)
        if self._tracer is not None and trace is not None:
            stay = _stay(command, run, now, observed)
            record_stay(self._tracer, trace, stay, instance_id=settings.instance_id)

    def _requeued(self, request: QueuedRequest) -> None:
        if self._stories is not None and request.history:
            requeued = RequeuedRequest(
                tenant=request.tenant, request_id=request.request_id, step=request.history[-1]
            )
            self._stories.requeued(requeued)

    async def _finished(self, command: Depart, run: Run | None, observed: RequestObserved) -> None:
        if self._stories is not None:
            self._stories.ended(_story(command, run, observed))
        await self._reporter.observed(observed)


def _observation(
    command: Depart, run: Run | None, now: UnixTime, outcome: str, settings: InstanceSettings
) -> RequestObserved:
    """The observation of a request that ended here with *outcome*."""
    request = command.request
    answer = run.answer if run is not None else AnswerStream(request)
    counted = run.prompt_tokens if run is not None and outcome == COMPLETED else 0
    return RequestObserved(
        request_id=request.request_id,
        instance_id=settings.instance_id,
        model=request.model.base,
        engine=settings.engine,
        device=settings.device,
        application=request.application,
        tenant=request.tenant,
        qos_class=request.slo.qos_class,
        prompt_tokens=counted or request.prompt_tokens,
        # The mean of a call's answers: lengths of single answers are predicted from it.
        output_tokens=answer.num_tokens // request.num_answers,
        arrived_at=request.arrived_at,
        pulled_at=command.pulled_at,
        submitted_at=command.submitted_at,
        first_token_at=answer.first_token_at or 0.0,
        finished_at=now,
        attained=outcome == COMPLETED and answer.verdict(finished_at=now).attained,
        outcome=outcome,
        evictions=request.attempts.evictions,
        crashes=request.attempts.crashes,
        cached_tokens=answer.cached_tokens,
        relegated=request.attempts.relegated,
        max_tbt_s=answer.max_tbt_s,
        prompt_text=prompt_text(request) if counted else None,
        finish_reason=answer.finish_reason,
        max_tokens=request.sampling.max_tokens // request.num_answers,
        ignore_eos=request.sampling.ignore_eos,
        grouped_at=request.grouped_at,
        predicted_wait=request.predicted_wait,
    )


def _stay(
    command: Depart, run: Run | None, now: UnixTime, observed: RequestObserved | None
) -> Stay:
    """The stay of a request whose outcome was published; *observed* if it ended."""
    return Stay(
        request=command.request,
        pulled_at=command.pulled_at,
        submitted_at=command.submitted_at,
        first_token_at=None if run is None else run.answer.first_token_at,
        ended_at=now,
        outcome=command.how,
        num_tokens=0 if run is None else run.answer.num_tokens,
        observed=observed,
        error=None if observed is None or observed.outcome == COMPLETED else observed.outcome,
    )


def _story(command: Depart, run: Run | None, observed: RequestObserved) -> Story:
    """The record of a request that ended here."""
    return msgspec.structs.replace(
        story_of(command.request),
        outcome=observed.outcome,
        attained=observed.attained,
        queue=command.tags[0].queue if command.tags else "",
        prompt_tokens=observed.prompt_tokens,
        output_tokens=observed.output_tokens,
        pulled_at=command.pulled_at,
        submitted_at=command.submitted_at,
        first_token_at=observed.first_token_at,
        finished_at=observed.finished_at,
        prefill_s=0.0 if run is None else run.prefill_s,
        instance_id=observed.instance_id,
        late_tokens=0 if run is None else run.answer.late_tokens,
        max_tbt_s=observed.max_tbt_s,
    )
