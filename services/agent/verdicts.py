"""What a run has to show when it ends: its progress, its verdict, and where it goes from here."""

import msgspec

from services.agent.state import Run
from shared.contracts.lanes import LaneKey, relegated_name
from shared.contracts.qos import QosClass, SloVerdict
from shared.contracts.requests import Progress, QueuedRequest


def progress_of(run: Run) -> Progress:
    """What a run has to show, to travel with its request."""
    return Progress(
        token_ids=tuple(run.token_ids),
        first_token_at=run.first_token_at,
        late_tokens=run.late_tokens,
        max_tbt_s=run.max_tbt_s,
    )


def with_progress(run: Run) -> QueuedRequest:
    """The request as it goes on elsewhere, or later."""
    return msgspec.structs.replace(run.request, progress=progress_of(run))


def verdict_of(run: Run, *, finished_at: float) -> SloVerdict:
    """Whether every target that was set was met, where the tokens were made."""
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
    """Where it waits, ahead of its lane, to be run again."""
    if request.attempts.relegated:
        return relegated_name(request.model.base)
    return LaneKey.parse(request.lane).resume_name
