"""Virtual time."""

import heapq
from collections.abc import Callable
from itertools import count

from shared.contracts.base import Seconds, UnixTime

Action = Callable[[], None]


class Timeline:
    """Actions in order of their times; actions at equal times run in the order of their calls."""

    def __init__(self) -> None:
        self.now: UnixTime = 0.0
        self._actions: list[tuple[UnixTime, int, Action]] = []
        self._numbers = count()

    def at(self, at: UnixTime, action: Action) -> None:
        """Run *action* at *at*, or now if that has passed."""
        heapq.heappush(self._actions, (max(self.now, at), next(self._numbers), action))

    def after(self, delay_s: Seconds, action: Action) -> None:
        """Run *action* after *delay_s*."""
        self.at(self.now + delay_s, action)

    def run(self, until: UnixTime) -> None:
        """Run all actions until *until*."""
        while self._actions and self._actions[0][0] <= until:
            self.now, _, action = heapq.heappop(self._actions)
            action()
        self.now = until
