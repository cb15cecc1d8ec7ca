"""Multi-step work of an instance: generators that yield commands and conditions."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from shared.contracts.base import UnixTime
from solver.instance.commands import Call, Command
from solver.instance.events import Done, Failed
from solver.planning.lso.operations import Track


@dataclass(frozen=True, slots=True)
class Wait:
    """Condition for the next step of a script. The script receives whether the condition holds."""

    until: Callable[[], bool]
    deadline: UnixTime = math.inf
    """Time from which the script continues in any case."""


Script = Generator[Command | Wait, "bool | Done | Failed", None]
"""
Steps of one piece of work. A `Call` returns the event with its number; other commands return
at once.
"""


@dataclass(slots=True, eq=False)
class _Active:
    script: Script
    wait: Wait | None = None
    call: int | None = None
    """Number of the call whose answer the script awaits."""
    answer: Done | Failed | None = None

    def is_due(self, now: UnixTime) -> bool:
        if self.call is not None:
            return self.answer is not None
        return self.wait is None or self.wait.deadline <= now or self.wait.until()

    def resume(self) -> Command | Wait:
        wait, answer = self.wait, self.answer
        self.wait = self.call = self.answer = None
        if answer is not None:
            return self.script.send(answer)
        if wait is not None:
            return self.script.send(wait.until())
        return next(self.script)


class Scripts:
    """Runs scripts until each waits; call `advance` after each event."""

    def __init__(self) -> None:
        self._active: list[_Active] = []

    def start(self, script: Script) -> None:
        """Begin *script* at the next `advance`."""
        self._active.append(_Active(script))

    def answer(self, event: Done | Failed) -> None:
        """Give the result of a call to the script that awaits it."""
        for each in self._active:
            if each.call == event.command:
                each.answer = event

    def advance(self, now: UnixTime) -> Iterator[Command]:
        """Execute all steps that are due; a step may make steps of other scripts due."""
        while due := [each for each in self._active if each.is_due(now)]:
            for each in due:
                yield from self._run(each, now)

    @property
    def busy(self) -> bool:
        """True while a script has not ended."""
        return bool(self._active)

    def is_due(self, now: UnixTime) -> bool:
        """Return whether a step can be executed."""
        return any(each.is_due(now) for each in self._active)

    def deadline(self) -> UnixTime:
        """Earliest deadline of a condition; infinite if no condition has one."""
        return min(
            (each.wait.deadline for each in self._active if each.wait is not None),
            default=math.inf,
        )

    def _run(self, each: _Active, now: UnixTime) -> Iterator[Command]:
        while each.is_due(now):
            try:
                step = each.resume()
            except StopIteration:
                self._active.remove(each)
                return
            if isinstance(step, Wait):
                each.wait = step
                continue
            if isinstance(step, Call):
                each.call = step.command
            yield step


class Turn:
    """
    The place of one operation in the queues of its tracks.

    It joins the queue of its next track when it heads those before, always in the order of
    `Track`. So an operation that waits for its first track does not block its second.
    """

    def __init__(self, tracks: tuple[Track, ...]) -> None:
        self.tracks = tuple(track for track in Track if track in tracks)
        self.joined = 0
        """Number of tracks whose queues it has joined."""


class Tracks:
    """Queues of operations, in order of arrival."""

    def __init__(self) -> None:
        self._queues: dict[Track, deque[Turn]] = {track: deque() for track in Track}

    def join(self, tracks: tuple[Track, ...]) -> Turn:
        """Queue an operation on *tracks*."""
        turn = Turn(tracks)
        self._queue(turn)
        return turn

    def is_first(self, turn: Turn) -> bool:
        """Return whether the operation may run; it keeps its tracks until `leave`."""
        while turn.joined < len(turn.tracks) and self._heads(turn, turn.joined - 1):
            self._queue(turn)
        return turn.joined == len(turn.tracks) and self._heads(turn, turn.joined - 1)

    def leave(self, turn: Turn) -> None:
        """Remove an operation that has ended."""
        for track in turn.tracks[: turn.joined]:
            self._queues[track].remove(turn)

    def _queue(self, turn: Turn) -> None:
        self._queues[turn.tracks[turn.joined]].append(turn)
        turn.joined += 1

    def _heads(self, turn: Turn, index: int) -> bool:
        return self._queues[turn.tracks[index]][0] is turn
