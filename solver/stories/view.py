"""A finished request as operators see it: facts, phases, and the sentence about its lateness."""

from typing import Literal

import msgspec

from shared.contracts.base import Seconds, UnixTime
from shared.contracts.qos import Slo
from shared.contracts.stories.story import Story
from solver.stories.lost_time import lost_time
from solver.stories.sentence import sentence_of
from solver.stories.timeline import Phase, timeline


class PhaseView(msgspec.Struct, frozen=True, kw_only=True):
    """Time in one phase."""

    phase: str
    begun_at: UnixTime
    duration_s: Seconds
    instance: str | None
    why: str


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the history."""

    at: UnixTime
    instance: str
    what: str
    why: str


class LostView(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the lost time."""

    phase: str
    lost_s: Seconds


class StoryView(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request; times are Unix seconds."""

    id: str
    object: Literal["story"] = "story"
    tenant: str
    sentence: str
    """Why the request was late, or that it was not."""
    cause: str | None
    """Phase with the largest share of the lost time; null if the request was not late."""
    late: bool
    outcome: str
    """`completed` or the code of the error."""
    attained: bool
    model: str
    qos_class: str
    slo: Slo
    session: str | None
    lane: str
    instance: str | None
    """The last instance."""
    prompt_tokens: int
    output_tokens: int
    late_tokens: int
    max_tbt_s: Seconds
    arrived_at: UnixTime
    first_token_at: UnixTime | None
    finished_at: UnixTime
    predicted_wait_s: Seconds | None
    """Wait until the first run that was predicted when the request was put into its lane."""
    waited_s: Seconds | None
    """Wait from its lane until its first run; null without a run."""
    hops: int
    evictions: int
    crashes: int
    relegated: bool
    lost: list[LostView]
    """Lost time by phase, the largest share first."""
    phases: list[PhaseView]
    history: list[StepView]


def view_of(story: Story) -> StoryView:
    """The record of a request in the form of the HTTP interface and of `headway request show`."""
    stretches, lost, wait = timeline(story), lost_time(story), story.predicted_wait
    runs = [
        each.begun_at
        for each in stretches
        if each.phase in (Phase.ENGINE, Phase.PREFILL, Phase.DECODE, Phase.DIED)
    ]
    return StoryView(
        id=story.request_id,
        tenant=story.tenant,
        sentence=sentence_of(story),
        cause=lost[0].phase.value if lost else None,
        late=story.is_late,
        outcome=story.outcome,
        attained=story.attained,
        model=story.model,
        qos_class=story.slo.qos_class.value,
        slo=story.slo,
        session=story.session,
        lane=story.lane,
        instance=story.instance_id,
        prompt_tokens=story.prompt_tokens,
        output_tokens=story.output_tokens,
        late_tokens=story.late_tokens,
        max_tbt_s=story.max_tbt_s,
        arrived_at=story.arrived_at,
        first_token_at=story.first_token_at or None,
        finished_at=story.finished_at,
        predicted_wait_s=None if wait is None else wait.mean_s,
        waited_s=runs[0] - story.grouped_at if runs else None,
        hops=story.attempts.hop,
        evictions=story.attempts.evictions,
        crashes=story.attempts.crashes,
        relegated=story.attempts.relegated,
        lost=[LostView(phase=each.phase.value, lost_s=each.lost_s) for each in lost],
        phases=[
            PhaseView(
                phase=each.phase.value,
                begun_at=each.begun_at,
                duration_s=each.duration_s,
                instance=each.instance_id,
                why=each.why,
            )
            for each in stretches
        ],
        history=[
            StepView(at=each.at, instance=each.instance_id, what=each.what, why=each.why)
            for each in story.history
        ],
    )
