"""Use of a search's budget: one long annealing, or trials and a final phase from the best."""

from collections.abc import Callable

from solver.planning.problem.problem import QueueOrder
from solver.planning.search.annealing import Annealer

MOVES_AT_ONCE = 500
"""Moves between two readings of the clock; some milliseconds."""
_WARM = (0.002, 0.0003)
"""
First and last temperature when most of the plan in force should stay; all temperatures here
are relative to the mean weight of a group.
"""
_COLD = (0.1, 0.003)
"""Temperatures of one long search for a new plan."""
_TRIED, _FINISHED = (0.1, 0.01), (0.02, 0.003)
"""Temperatures of each trial, and of the final phase from the best trial."""
_MOST_TRIALS = 4
_TRYING = 0.6
"""Share of the budget for all trials together."""
_LEAST_PER_PAIR = 1.5
"""Least moves of a trial over the squared number of groups; with fewer, one search is better."""
_MEASURED = 0.02
"""Share of the budget in which the rate of moves is measured."""


class Search:
    """
    Improves the plan that *annealer* has until its budget is spent.

    A single search that has time to freeze ends in a good or in a bad valley by chance. Several
    shorter ones are as good on average, and the best of them is rarely bad.

    Args:
        annealer: Has the plan to begin from.
        num_groups: Number of groups, by which temperatures are divided.
        spent: Returns the used share of the budget, 1 or more at its end.
    """

    def __init__(self, annealer: Annealer, num_groups: int, spent: Callable[[], float]) -> None:
        self._annealer = annealer
        self._num_groups = num_groups
        self._spent = spent
        self.num_moves = 0
        """Changes that were tried."""

    def from_plan(self) -> None:
        """Search near the plan."""
        self._cool(*_WARM, until=1.0)

    def everywhere(self, start: QueueOrder) -> None:
        """Search everywhere; trials begin at *start*, the current plan of the annealer."""
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
        """Number of trials such that each has enough moves; 1 is a single search."""
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
