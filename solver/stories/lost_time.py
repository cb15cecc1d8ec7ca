"""The time that a late request lost, by phase."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.contracts.base import Seconds
from shared.contracts.ends import DEADLINE_EXPIRED
from shared.contracts.qos import QosClass
from shared.contracts.stories.story import Story
from solver.stories.timeline import Phase, Stretch, timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Which targets a request missed, and by how much; 0 for a target that it met or has not."""

    first_token_s: Seconds = 0.0
    completion_s: Seconds = 0.0
    late_tokens: int = 0
    expired: bool = False
    """True if the request ended at its end, without its whole answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Part of the lost time."""

    phase: Phase
    lost_s: Seconds
    longest: Stretch
    """The longest time in this phase, with its instance and reason."""


def lateness_of(story: Story) -> Lateness | None:
    """The missed targets of a request; None if it was not late."""
    if not story.is_late:
        return None
    slo, arrived_at = story.slo, story.arrived_at
    first_at = story.first_token_at or story.finished_at
    return Lateness(
        first_token_s=max(0.0, first_at - slo.first_token_deadline_at(arrived_at)),
        completion_s=max(0.0, story.finished_at - slo.completion_deadline_at(arrived_at)),
        late_tokens=story.late_tokens if slo.tbt_s is not None else 0,
        expired=story.outcome == DEADLINE_EXPIRED,
    )


def lost_time(story: Story) -> tuple[Share, ...]:
    """
    The lost time of a late request by phase, the largest share first; of equal shares, the first
    one of `Phase`. Empty if the request was not late, or if its record has no times.

    Waits count in full: those before the first token if the first token or the whole answer was
    late, those after it if tokens or the whole answer were late. The prefill counts in full if the
    first token was late. Of the rest of the service, the part counts that exceeds the target: the
    pace of the tokens, or the time for the whole answer. Of a gap between tokens, the part counts
    that exceeds the pace and the longest pause. If nothing of this has any time, the longest phase
    counts.
    """
    missed = lateness_of(story)
    if missed is None:
        return ()
    stretches = timeline(story)
    spent, longest = _by_phase(_counted(story, missed, stretches))
    lost = {
        phase: each
        for phase, each in {**spent, **_excess(story, missed, spent)}.items()
        if each > 0
    }
    if not lost and stretches:
        spent, longest = _by_phase(stretches)
        phase = max(spent, key=lambda each: spent[each])
        lost = {phase: spent[phase]}
    order = list(Phase)
    shares = [Share(phase=key, lost_s=lost[key], longest=longest[key]) for key in lost]
    return tuple(sorted(shares, key=lambda share: (-share.lost_s, order.index(share.phase))))


def _counted(story: Story, missed: Lateness, stretches: Iterable[Stretch]) -> Iterable[Stretch]:
    """Phases in which time may have been lost."""
    whole = missed.completion_s > 0 or missed.expired
    before, after = whole or missed.first_token_s > 0, whole or missed.late_tokens > 0
    first_at = story.first_token_at or story.finished_at
    for stretch in stretches:
        if after if stretch.begun_at >= first_at else before:
            yield stretch


def _excess(story: Story, missed: Lateness, spent: Mapping[Phase, Seconds]) -> dict[Phase, Seconds]:
    """Service beyond its target, by phase."""
    slo, decode_s = story.slo, spent.get(Phase.DECODE, 0.0)
    needed = [Phase.DECODE] if missed.first_token_s > 0 else [Phase.PREFILL, Phase.DECODE]
    service_s = sum(spent.get(phase, 0.0) for phase in needed)
    # A deadline by the client's clock may precede the arrival.
    target_s = max(0.0, slo.completion_deadline_at(story.arrived_at) - story.arrived_at)
    share = 0.0 if service_s <= target_s else 1 - target_s / service_s
    excess = {phase: share * spent.get(phase, 0.0) for phase in needed}
    if slo.tbt_s is not None and slo.qos_class is QosClass.INTERACTIVE:
        slow_s = decode_s - slo.tbt_s * max(0, story.output_tokens - 1)
        stalled_s = story.max_tbt_s - slo.tbt_s - max(_pauses(story), default=0.0)
        excess[Phase.DECODE] = max(excess[Phase.DECODE], min(decode_s, max(slow_s, stalled_s)))
    return excess


def _pauses(story: Story) -> Iterable[Seconds]:
    """Times between runs after the first token."""
    for stretch in timeline(story):
        if stretch.phase is not Phase.DECODE and stretch.begun_at >= story.first_token_at:
            yield stretch.duration_s


def _by_phase(
    stretches: Iterable[Stretch],
) -> tuple[dict[Phase, Seconds], dict[Phase, Stretch]]:
    """Total time of each phase, and its longest stretch."""
    spent: defaultdict[Phase, Seconds] = defaultdict(float)
    longest: dict[Phase, Stretch] = {}
    for stretch in stretches:
        spent[stretch.phase] += stretch.duration_s
        known = longest.get(stretch.phase)
        if known is None or stretch.duration_s > known.duration_s:
            longest[stretch.phase] = stretch
    return dict(spent), longest
