"""Which of several instances that ask for work gets the next request."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shared.contracts.base import Seconds
from solver.instance.admission.urgent import DEFAULT_TARGET_S
from solver.instance.events import PullEnded
from solver.instance.load import num_free, prefill_pace
from solver.instance.state import InstanceState

PATIENCE_S: Seconds = 0.005
"""Time for which an instance waits for one that would begin a request sooner."""
_UNPROVEN, _PER_PULL = 0.3, 0.1
"""Waits in multiples of the target, see `Turns._rank`."""
_CONCURRENT = 2
"""Pulls from one queue at once."""
T = TypeVar("T")
Granted = Callable[[], None]
Refused = Callable[[PullEnded], None]


@dataclass(slots=True, eq=False)
class Asking:
    """One instance that waits for its turn to pull, or has it."""

    instance: InstanceState
    queue: str
    granted: Granted
    refused: Refused
    until_s: Seconds
    """Time from which the instance no longer waits for better ones."""
    is_pulling: bool = False


class Turns:
    """
    The turns of the instances of one process to pull from their common queues.

    Instances that decide alone would take requests in the order in which notices reach them; here
    the one that can begin a request soonest takes it. One answer of the broker that a queue is
    empty serves all that ask.

    Args:
        clock: Monotonic time in seconds.
        call_later: Calls a function after a number of seconds.
    """

    def __init__(
        self,
        clock: Callable[[], Seconds],
        call_later: Callable[[Seconds, Callable[[], None]], object],
    ) -> None:
        self._clock = clock
        self._call_later = call_later
        self._members: set[InstanceState] = set()
        self._asking: dict[str, list[Asking]] = {}
        self._in_flight: Counter[str] = Counter()
        """Queue -> pulls in progress."""
        self._granted: Counter[InstanceState] = Counter()
        """Instance -> pulls in progress."""
        self._most_run = 0
        """Largest number of runs that any of the engines was seen to have at once."""

    def join(self, instance: InstanceState) -> None:
        """Let an instance take part."""
        self._members.add(instance)

    def leave(self, instance: InstanceState) -> None:
        """Forget an instance; its last pulls may still end."""
        self._members.discard(instance)

    def ask(
        self, instance: InstanceState, queue: str, granted: Granted, refused: Refused
    ) -> Asking:
        """
        Call *granted* when it is the turn of *instance*, or *refused* with the result of another
        pull that found no request.
        """
        asking = Asking(instance, queue, granted, refused, self._clock() + PATIENCE_S)
        self._asking.setdefault(queue, []).append(asking)
        self._look(queue)
        return asking

    def withdraw(self, asking: Asking) -> None:
        """Forget an instance that no longer waits."""
        if asking.is_pulling:
            self.ended(asking, None)
            return
        waiting = self._asking.get(asking.queue, [])
        if asking in waiting:
            waiting.remove(asking)

    def ended(self, asking: Asking, nothing: PullEnded | None) -> None:
        """
        Record the end of a pull.

        Args:
            asking: The instance whose turn it was.
            nothing: The result of a pull that found no request; None: there was one, or the pull
                failed for this instance only.
        """
        queue = asking.queue
        _forget_one(self._in_flight, queue)
        _forget_one(self._granted, asking.instance)
        if nothing is None:
            self._look(queue)
            return
        for each in self._asking.pop(queue, ()):
            each.refused(nothing)

    def _look(self, queue: str) -> None:
        """Give turns to the best instances that ask."""
        runs = (each.engine.most_run or 0 for each in self._members)
        self._most_run = max(runs, default=0)
        while (asking := self._asking.get(queue)) and self._in_flight[queue] < _CONCURRENT:
            best = min(asking, key=lambda each: self._rank(each.instance))
            wait_s = best.until_s - self._clock()
            if wait_s > 0 and not self._is_first(best.instance):
                self._call_later(wait_s, lambda: self._look(queue))
                return
            asking.remove(best)
            if not asking:
                del self._asking[queue]
            best.is_pulling = True
            self._in_flight[queue] += 1
            self._granted[best.instance] += 1
            best.granted()

    def _is_first(self, instance: InstanceState) -> bool:
        rank = self._rank(instance)
        return all(rank <= self._rank(each) for each in self._members)

    def _rank(self, instance: InstanceState) -> tuple[bool, Seconds, float]:
        """
        Sort key by the time until one more request has its first token, smallest first.

        A slot that no engine of the agent was ever seen to use may not exist. It is worth a wait,
        as is each pull in progress, whose request is not known yet, and each prompt in the engine
        while no profile says how long they take.
        """
        # Pulls that wait for their turn take no slot yet.
        free = num_free(instance) + instance.num_pulls - self._granted[instance]
        is_known = instance.engine.most_run is None
        unproven = 0 if is_known else max(0, instance.engine.max_running - self._most_run)
        target_s = instance.urgent.target_s(instance.now)
        unit_s = DEFAULT_TARGET_S if math.isinf(target_s) else target_s
        wait_s = prefill_pace(instance) * instance.room.prefill_s()
        if instance.profile is None:
            wait_s += _PER_PULL * unit_s * len(instance.requests.not_begun)
        wait_s += _PER_PULL * self._granted[instance] * unit_s
        wait_s += _UNPROVEN * (free <= unproven) * unit_s
        cannot = free <= 0 or not instance.may_pull or instance.now < instance.pull_at
        return (cannot, wait_s, instance.room.taken(instance.engine))


def _forget_one(counts: Counter[T], key: T) -> None:
    """Count one less, without an entry for nothing."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
