"""One sentence that says why a request was late, or that it was not."""

from collections.abc import Callable, Mapping
from math import isinf

from shared.contracts.base import Seconds
from shared.contracts.lanes import is_inbox
from shared.contracts.stories.story import COMPLETED, Story
from solver.planning.lso.operations import Rule
from solver.stories.lost_time import Lateness, Share, lateness_of, lost_time
from solver.stories.timeline import Phase, Step, Stretch, timeline

_LONG_S: Seconds = 100.0
"""Duration from which tenths of seconds do not matter."""
_FOR_THE_HEAD = Rule.HEAD_NEEDS_ROOM.value.partition("{")[0]
_DISTURBANCES = (
    *(Phase.DIED, Phase.CRASHED, Phase.EVICTED, Phase.RELEGATED, Phase.SWAPPED_OUT, Phase.SWAP),
    Phase.HANDED_BACK,
)
"""Phases that are named also if the request was in time."""


def sentence_of(story: Story) -> str:
    """
    Why a request was late, by the largest share of its lost time; for a request that was not late,
    how it ended, and the longest disturbance of its service.
    """
    missed = lateness_of(story)
    if missed is None:
        return f"{_in_time(story)}{_disturbance(story)}{_passed(story)}."
    shares = lost_time(story)
    cause = _clause(story, shares[0]) if shares else "of times that its record does not have"
    return f"{_late(story, missed)} because {cause}{_passed(story)}."


def _late(story: Story, missed: Lateness) -> str:
    if missed.expired:
        return "It ended at its end without its whole answer"
    if missed.first_token_s > 0:
        return f"Its first token came {seconds(missed.first_token_s)} late"
    if missed.completion_s > 0:
        return f"Its answer was complete {seconds(missed.completion_s)} late"
    return f"{missed.late_tokens} of its {story.output_tokens} tokens came late"


def _in_time(story: Story) -> str:
    took_s = story.finished_at - story.arrived_at
    if story.outcome != COMPLETED:
        return f"It ended with the error {story.outcome}{_when(story)}"
    deadline_at = story.slo.planning_deadline_at(story.arrived_at)
    if isinf(deadline_at):
        return f"It has no deadline, and its answer was complete after {seconds(took_s)}"
    is_first = story.slo.ttft_s is not None
    at = (story.first_token_at or story.finished_at) if is_first else story.finished_at
    what = "first token came" if is_first else "answer was complete"
    return f"It was in time: its {what} {seconds(deadline_at - at)} before its deadline"


def _when(story: Story) -> str:
    """When a request without an answer ended; the arrival of a held one is its `not_before`."""
    if not story.arrived_at:
        return ", and was never in a lane"
    took_s = story.finished_at - story.arrived_at
    return f" {seconds(abs(took_s))} {'before' if took_s < 0 else 'after'} it could begin"


def _disturbance(story: Story) -> str:
    """The longest wait that a death, an operation or a model swap caused; empty without one."""
    found = [each for each in timeline(story) if each.phase in _DISTURBANCES]
    if not found:
        return ""
    longest = max(found, key=lambda each: each.duration_s)
    share = Share(phase=longest.phase, lost_s=longest.duration_s, longest=longest)
    return f"; {_clause(story, share)}"


def _passed(story: Story) -> str:
    """That the last instance did not hold work back when it began the request; else empty."""
    passed = [each for each in story.history if each.what == Step.PASSED.value]
    if not passed or passed[-1].instance_id != story.instance_id:
        return ""
    return f"; {story.instance_id} passed it on without holding work back, {passed[-1].why}"


def _clause(story: Story, share: Share) -> str:
    return _CLAUSES[share.phase](story, share.longest, seconds(share.lost_s))


def _where(stretch: Stretch) -> str:
    return stretch.instance_id or "an instance"


def _reason(stretch: Stretch) -> str:
    """Reason of an operation, as the end of a clause."""
    if stretch.why.startswith(_FOR_THE_HEAD):
        return " for a request with a nearer deadline"
    return f" ({stretch.why})" if stretch.why else ""


def _lane(story: Story, stretch: Stretch, took: str) -> str:
    if is_inbox(story.queue) and stretch.ended_at == story.pulled_at:
        return f"it waited {took} in {story.queue}, behind requests that were sent there before"
    if story.queue.startswith("overflow."):
        return f"it waited {took} in {story.queue}: its tenant was above its share"
    wait = story.predicted_wait
    predicted = "" if wait is None else f" ({seconds(wait.mean_s)} were predicted)"
    relegated = _relegated_by(story)
    late = f", and {relegated} relegated it then" if relegated else ""
    return (
        f"it waited {took} in its lane, where work with nearer deadlines is served first"
        f"{predicted}{late}"
    )


def _relegated_by(story: Story) -> str:
    """Instance that relegated the request; empty if none did."""
    steps = (each for each in story.history if each.what == Step.RELEGATED.value)
    return next((each.instance_id for each in steps), "")


def _engine(_story: Story, stretch: Stretch, took: str) -> str:
    return f"it waited {took} in the engine of {_where(stretch)}, behind the prefills of others"


def _prefill(story: Story, stretch: Stretch, took: str) -> str:
    return f"the prefill of its {story.prompt_tokens} tokens took {took} on {_where(stretch)}"


def _decode(story: Story, stretch: Stretch, took: str) -> str:
    decode_s = sum(each.duration_s for each in timeline(story) if each.phase is Phase.DECODE)
    one_s = decode_s / max(1, story.output_tokens - 1)
    target_s = story.slo.tbt_s
    target = "" if target_s is None else f", {seconds(target_s)} is the target"
    return (
        f"the engine of {_where(stretch)} was slow by {took}: its {story.output_tokens} tokens "
        f"took {seconds(decode_s)} ({seconds(one_s)} each{target})"
    )


_CLAUSES: Mapping[Phase, Callable[[Story, Stretch, str], str]] = {
    Phase.DIED: lambda story, stretch, took: (
        f"{_where(stretch)} died or lost its connection with it: {took} passed until "
        f"{_again(story)}"
    ),
    Phase.CRASHED: lambda _story, stretch, took: (
        f"the engine of {_where(stretch)} died, and it waited {took} to run again"
    ),
    Phase.EVICTED: lambda _story, stretch, took: (
        f"{_where(stretch)} evicted it{_reason(stretch)}, and it waited {took} to run again"
    ),
    Phase.RELEGATED: lambda _story, stretch, took: (
        f"{_where(stretch)} relegated it when its deadline could no longer be met, and it waited "
        f"{took} behind work that can be in time"
    ),
    Phase.SWAPPED_OUT: lambda _story, stretch, took: (
        f"{_where(stretch)} swapped it out{_reason(stretch)} for {took}"
    ),
    Phase.SWAP: lambda story, stretch, took: (
        f"it waited {took} while {_where(stretch)} activated its model {story.model}"
    ),
    Phase.HANDED_BACK: lambda _story, stretch, took: (
        f"{_where(stretch)} handed it back without a run, and it waited {took} for another pull"
    ),
    Phase.LANE: _lane,
    Phase.WINDOW: lambda _story, stretch, took: (
        f"it waited {took} on {_where(stretch)} for room in the engine"
    ),
    Phase.ENGINE: _engine,
    Phase.PREFILL: _prefill,
    Phase.DECODE: _decode,
    Phase.INTAKE: lambda _story, _stretch, took: f"it waited {took} for a grouper",
}
"""Phase -> clause about a request that lost time there."""


def _again(story: Story) -> str:
    if story.instance_id is None:
        return "it ended"
    return f"{story.instance_id} pulled it"


def seconds(duration_s: Seconds) -> str:
    """A duration for people: `12 ms`, `3.1 s`, `250 s`."""
    if duration_s < 1:
        return f"{duration_s * 1000:.0f} ms"
    return f"{duration_s:.1f} s" if duration_s < _LONG_S else f"{duration_s:.0f} s"
