"""How a search spends its budget: one long annealing, or trials and a finish from the best."""

from collections.abc import Callable

from solver.planning.problem import QueueOrder
from solver.planning.search.annealing import Annealer

MOVES_AT_ONCE = 500
"""Between two looks at the clock; some milliseconds."""
_WARM = (0.002, 0.0003)
"""Temperatures at first and at last, where most of a plan in force is to stay; like all here,
over the mean weight of a group."""
_COLD = (0.1, 0.003)
"""Of one long search for a plan made anew."""
_TRIED, _FINISHED = (0.1, 0.01), (0.02, 0.003)
"""Of each trial, and from the best of them on."""
_MOST_TRIALS = 4
_TRYING = 0.6
"""Of the budget, all trials together."""
_LEAST_PER_PAIR = 1.5
"""Moves of a trial, over the number of groups squared; with less, a single search gets farther."""
_MEASURED = 0.02
"""Of the budget, in which the pace of moves is measured."""


class Search:
    """
    Improves the plan that *annealer* has until its budget is spent.

    A search that has time enough to freeze does so by chance in a good valley or in a bad one.
    Several shorter ones end as well on average, and the best of them is hardly ever bad.

    Args:
        annealer: With the plan to begin from.
        num_groups: What temperatures are divided by.
        spent: The share of the budget that is gone, 1 or more at its end.
    """

    def __init__(self, annealer: Annealer, num_groups: int, spent: Callable[[], float]) -> None:
        self._annealer = annealer
        self._num_groups = num_groups
        self._spent = spent
        self.num_moves = 0
        """Changes that were tried."""

    def from_plan(self) -> None:
        """Stay near the plan."""
        self._cool(*_WARM, until=1.0)

    def anew(self, start: QueueOrder) -> None:
        """Go anywhere; *start* is where trials begin, and what the annealer has."""
        trials = self._num_trials()
        if trials == 1:
            self._cool(*_COLD, until=1.0)
            return
        for trial in range(trials):
            if trial > 0:
                self._annealer.restart(start)
            self._cool(*_TRIED, until=_TRYING * (trial + 1) / trials)
        self._annealer.restart(self._annealer.best())
        self._cool(*_FINISHED, until=1.0)

    def _num_trials(self) -> int:
        """So many that each has moves enough; 1 is a single search."""
        before, begun = self.num_moves, self._spent()
        self._cool(_COLD[0], _COLD[0], until=min(1.0, begun + _MEASURED))
        share = self._spent() - begun
        if self.num_moves == before or share <= 0:
            return 1
        moves = (self.num_moves - before) / share * _TRYING
        return min(_MOST_TRIALS, max(1, int(moves / (_LEAST_PER_PAIR * self._num_groups**2))))

    def _cool(self, first: float, last: float, *, until: float) -> None:
        """Anneal from one temperature to the other, in proportion to the budget."""
        begun = now = self._spent()
        while now < until:
            progress = (now - begun) / (until - begun)
            temperature = first * (last / first) ** progress / self._num_groups
            self._annealer.run(MOVES_AT_ONCE, hot=temperature, cold=temperature)
            self.num_moves += MOVES_AT_ONCE
            now = self._spent()
