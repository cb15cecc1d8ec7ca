"""The life of a finished request, divided into phases."""

from dataclasses import dataclass, field
from enum import Enum

from shared.contracts.base import InstanceId, Seconds, UnixTime
from shared.contracts.requests import HistoryEntry
from shared.contracts.stories.story import Story


class Step(Enum):
    """Kinds of entries in a request's history."""

    EVICTED = "evicted"
    SWAPPED_OUT = "swapped out"
    RESUMED = "resumed"
    PASSED = "passed on"
    """The instance did not hold work back for urgent requests when the run began."""
    RELEGATED = "relegated"
    HANDED_BACK = "handed back"
    CRASHED = "returned when the engine died"
    ACTIVATED = "activated"
    """The instance activated the model of the request while the request waited."""
    LOST = "lost"
    """The instance ended or lost its connection; the broker returned the request to its queue."""


class Phase(Enum):
    """
    What a request does or waits for. Of causes with equal shares of the lost time, the first one
    here is named.
    """

    DIED = "instance_died"
    """An instance has it that ends before it reports anything about it."""
    CRASHED = "engine_died"
    """It waits to run again after the death of its engine."""
    EVICTED = "evicted"
    """It waits to run again after an eviction."""
    RELEGATED = "relegated"
    """It waits behind work that can be in time."""
    SWAPPED_OUT = "swapped_out"
    """It waits on its instance, outside the engine, to run again."""
    SWAP = "model_swap"
    """The instance that pulls it next activates its model."""
    HANDED_BACK = "handed_back"
    """It waits for another pull after an instance returned it without a run."""
    LANE = "lane"
    """It waits in its lane, or in the queue that replaces the lane."""
    WINDOW = "window"
    """It waits on an instance for room in the engine."""
    ENGINE = "engine"
    """It waits inside the engine for its prefill; all the time to its first token, if the engine
    does not report the time of prefills."""
    PREFILL = "prefill"
    """The engine computes its prompt."""
    DECODE = "decode"
    """The engine generates its answer."""
    INTAKE = "intake"
    """It waits for a grouper."""


_WAITS_AFTER = {
    Step.EVICTED: Phase.EVICTED,
    Step.SWAPPED_OUT: Phase.SWAPPED_OUT,
    Step.RELEGATED: Phase.RELEGATED,
    Step.HANDED_BACK: Phase.HANDED_BACK,
    Step.CRASHED: Phase.CRASHED,
}
"""Step of the history -> phase of the wait that it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive time in one phase."""

    phase: Phase
    begun_at: UnixTime
    ended_at: UnixTime
    instance_id: InstanceId | None = None
    """Instance that has the request, or that caused the wait."""
    why: str = ""

    @property
    def duration_s(self) -> Seconds:
        return self.ended_at - self.begun_at


def timeline(story: Story) -> tuple[Stretch, ...]:
    """
    The phases of a request from its arrival to its end, without gaps; phases without time are left
    out.

    The times come from several machines. A time before that of an earlier stage counts as the time
    of the earlier stage.
    """
    if not story.arrived_at:
        return ()
    walk = _Walk(story, at=story.arrived_at)
    walk.to(story.grouped_at, Phase.INTAKE)
    for entry in story.history:
        walk.step(entry)
    walk.stay(
        story.instance_id, story.pulled_at or None, story.submitted_at or None, story.finished_at
    )
    return tuple(walk.stretches)


@dataclass(slots=True)
class _Walk:
    """Goes through the stages of a request in order."""

    story: Story
    at: UnixTime
    stretches: list[Stretch] = field(default_factory=list)
    _waits: Phase = Phase.LANE
    _cause: HistoryEntry | None = None
    """Step that began the present wait."""
    _pull: tuple[InstanceId | None, UnixTime | None] = (None, None)
    """Instance and time of the last pull."""

    def to(
        self, until: UnixTime, phase: Phase, instance_id: InstanceId | None = None, why: str = ""
    ) -> None:
        """Spend the time until *until* in *phase*."""
        until = min(until, self.story.finished_at)
        if until > self.at:
            stretch = Stretch(
                phase=phase,
                begun_at=self.at,
                ended_at=until,
                instance_id=instance_id,
                why=why,
            )
            self.stretches.append(stretch)
            self.at = until

    def step(self, entry: HistoryEntry) -> None:
        """Advance to the end of a step of the history."""
        match _step_of(entry):
            case Step.ACTIVATED:
                self._wait(entry.begun_at or entry.at)
                self.to(entry.at, Phase.SWAP, entry.instance_id, entry.why)
            case Step.LOST:
                self._wait(entry.pulled_at or entry.at)
                self.to(entry.at, Phase.DIED, entry.instance_id, entry.why)
            case Step.RESUMED:
                self._wait(entry.at)
            case Step.PASSED:
                self.stay(entry.instance_id, entry.pulled_at, None, entry.at)
            case step:
                self.stay(entry.instance_id, entry.pulled_at, entry.begun_at, entry.at)
                if step is not None:
                    self._waits, self._cause = _WAITS_AFTER[step], entry

    def stay(
        self,
        instance_id: InstanceId | None,
        pulled_at: UnixTime | None,
        begun_at: UnixTime | None,
        until: UnixTime,
    ) -> None:
        """Advance through the wait for an instance, the wait on it, and the run."""
        if pulled_at is None:
            self._wait(until)
            return
        if self._pull != (instance_id, pulled_at):
            self._wait(pulled_at)
            self._pull = instance_id, pulled_at
            self.to(until if begun_at is None else begun_at, Phase.WINDOW, instance_id)
        self._wait(until if begun_at is None else begun_at)
        if begun_at is not None:
            self._run(instance_id, begun_at, until)

    def _wait(self, until: UnixTime) -> None:
        cause = self._cause
        if cause is None:
            self.to(until, self._waits)
        else:
            self.to(until, self._waits, cause.instance_id, cause.why)

    def _run(self, instance_id: InstanceId | None, begun_at: UnixTime, until: UnixTime) -> None:
        story, first_at = self.story, self.story.first_token_at
        if not first_at or first_at > until:
            self.to(until, Phase.ENGINE, instance_id)
            return
        is_last = begun_at == story.submitted_at
        prefill_s = story.prefill_s if is_last else 0.0
        self.to(first_at - prefill_s, Phase.ENGINE, instance_id)
        self.to(first_at, Phase.PREFILL, instance_id)
        self.to(until, Phase.DECODE, instance_id)


def _step_of(entry: HistoryEntry) -> Step | None:
    """Kind of an entry; None for kinds of newer versions."""
    try:
        return Step(entry.what)
    except ValueError:
        return None
