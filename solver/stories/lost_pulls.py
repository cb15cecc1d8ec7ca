"""Pulls of a request that its record lacks, since their instances ended before a report."""

from collections.abc import Iterable, Sequence
from math import inf

import msgspec

from shared.contracts.base import InstanceId, UnixTime
from shared.contracts.requests import MAX_HISTORY, HistoryEntry
from shared.contracts.stories.story import Story
from solver.stories.timeline import Step

Pull = tuple[InstanceId, UnixTime]
"""Instance and time of a pull."""


def with_lost_pulls(story: Story, pulls: Sequence[Pull]) -> Story:
    """
    Copy of *story* whose history has an entry for each pull that led neither to a step of the
    history nor to the end.

    Args:
        story: The record of the request.
        pulls: Known pulls of the request.
    """
    lost = _lost(story, pulls)
    if not lost:
        return story
    times = sorted({at for _, at in (*pulls, *_reported(story))} | {story.finished_at})
    entries = [
        HistoryEntry(
            at=next((at for at in times if at > pulled_at), story.finished_at),
            instance_id=instance_id,
            what=Step.LOST.value,
            pulled_at=pulled_at,
        )
        for instance_id, pulled_at in lost
    ]
    history = sorted((*entries, *story.history), key=_begin)
    return msgspec.structs.replace(story, history=tuple(history))


def _begin(entry: HistoryEntry) -> UnixTime:
    """
    Place of an entry in the history: a lost pull precedes all that other instances do until the
    next pull, for example activations.
    """
    if entry.what == Step.LOST.value and entry.pulled_at is not None:
        return entry.pulled_at
    return entry.at


def _lost(story: Story, pulls: Iterable[Pull]) -> list[Pull]:
    reported = set(_reported(story))
    dropped = len(story.history) >= MAX_HISTORY  # the history lacks steps after its first one
    since = story.history[1].at if dropped else -inf
    until = story.pulled_at or story.finished_at
    return [pull for pull in pulls if pull not in reported and since < pull[1] < until]


def _reported(story: Story) -> Iterable[Pull]:
    for entry in story.history:
        if entry.pulled_at is not None:
            yield entry.instance_id, entry.pulled_at
    if story.instance_id is not None and story.pulled_at:
        yield story.instance_id, story.pulled_at
