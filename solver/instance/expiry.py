"""Ends of held requests: each ends at its end, in the window, in its rest or on the engine."""

from collections.abc import Iterator

from shared.contracts.base import UnixTime
from solver.instance import end
from solver.instance.commands import Command
from solver.instance.request import Ending, Phase
from solver.instance.state import InstanceState


def expire(instance: InstanceState, now: UnixTime) -> Iterator[Command]:
    """
    End the held requests that are past their ends, and abort their runs.

    A run that is being ended for another reason ends as expired when the engine has ended it.
    """
    for held in instance.ends.due(now):
        if held.phase in (Phase.WAITING, Phase.RESTING):
            yield from end.fail_expired(instance, held, end.WINDOW)
        elif held.phase is Phase.RUNNING:
            yield from end.abort(instance, held, Ending.EXPIRED)
