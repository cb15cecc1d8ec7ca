"""Result of a run at its end: progress, verdict, and the request's next queue."""

import msgspec

from services.agent.state import Run
from shared.contracts.lanes import LaneKey, relegated_name
from shared.contracts.qos import QosClass, SloVerdict
from shared.contracts.requests import Progress, QueuedRequest, StepDetails


def progress_of(run: Run) -> Progress:
    """Progress of a request at the end of a run, which is stored in the request."""
    return Progress(
        token_ids=tuple(run.token_ids),
        first_token_at=run.first_token_at,
        late_tokens=run.late_tokens,
        max_tbt_s=run.max_tbt_s,
        # Without tokens the next run begins again, and returns the details of the prompt again.
        details=details_of(run) if run.token_ids else (),
    )


def details_of(run: Run) -> tuple[StepDetails, ...]:
    """Details of the run's tokens; steps after the end of the answer are left out."""
    kept, num_tokens = [], 0
    for step in run.details:
        num_tokens += step.num_tokens
        if num_tokens > len(run.token_ids):
            break
        kept.append(step)
    return tuple(kept)


def with_progress(run: Run) -> QueuedRequest:
    """Copy of the request with the run's progress, from which another run can resume."""
    return msgspec.structs.replace(run.request, progress=progress_of(run))


def verdict_of(run: Run, *, finished_at: float) -> SloVerdict:
    """Verdict on every SLO target of a request, from the times of its tokens."""
    request = run.request
    slo, arrived_at = request.slo, request.arrived_at
    attained = finished_at <= slo.completion_deadline_at(arrived_at)
    if slo.qos_class is QosClass.INTERACTIVE:
        first_at = run.first_token_at or finished_at
        attained &= first_at <= slo.first_token_deadline_at(arrived_at)
        attained &= slo.tbt_s is None or run.late_tokens == 0
    return SloVerdict(
        attained=attained,
        ttft_s=None if run.first_token_at is None else run.first_token_at - arrived_at,
        ttlt_s=finished_at - arrived_at,
        max_tbt_s=run.max_tbt_s,
        late_tokens=run.late_tokens if slo.tbt_s is not None else 0,
    )


def return_queue(request: QueuedRequest) -> str:
    """
    Queue in which an interrupted request waits to run again, ahead of the requests in its lane.
    """
    if request.attempts.relegated:
        return relegated_name(request.model.base)
    return LaneKey.parse(request.lane).resume_name
