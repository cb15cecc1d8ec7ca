"""Use of the search budget: one long annealing, or trials and a final phase from the best trial."""

from collections.abc import Callable

from solver.planning.problem.problem import QueueOrder
from solver.planning.search.annealing import Annealer

MOVES_AT_ONCE = 500
"""Number of annealing moves between two readings of the clock; the moves take some milliseconds."""
_WARM = (0.002, 0.0003)
"""
First and last temperature of a search that keeps most of the plan in force. All temperatures of
this module are relative to the mean weight of a group.
"""
_COLD = (0.1, 0.003)
"""First and last temperature of a single long search for a new plan."""
_TRIED, _FINISHED = (0.1, 0.01), (0.02, 0.003)
"""First and last temperatures of each trial search, and of the final search from the best trial."""
_MOST_TRIALS = 4
_TRYING = 0.6
"""Share of the time budget for all trial searches together."""
_LEAST_PER_PAIR = 1.5
"""
Least number of moves of a trial, divided by the squared number of groups; with fewer moves, a
single search is better.
"""
_MEASURED = 0.02
"""Share of the time budget in which the rate of moves is measured."""


class Search:
    """
    Improves the plan of *annealer* until the budget is spent.

    The result of a single long search varies with its random numbers. Several shorter searches are
    as good on average, and the best of several is rarely bad.

    Args:
        annealer: Annealer with the initial plan.
        num_groups: Number of groups, by which temperatures are divided.
        spent: Returns the used share of the budget, 1 or more at its end.
    """

    def __init__(self, annealer: Annealer, num_groups: int, spent: Callable[[], float]) -> None:
        self._annealer = annealer
        self._num_groups = num_groups
        self._spent = spent
        self.num_moves = 0
        """Number of changes of the plan that were tried."""

    def from_plan(self) -> None:
        """Search for better plans near the initial plan, at low temperatures."""
        self._cool(*_WARM, until=1.0)

    def everywhere(self, start: QueueOrder) -> None:
        """
        Search for a new plan; each trial search begins at *start*, the current plan of the
        annealer.
        """
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
        """Largest number of trial searches that all have enough moves; 1 means a single search."""
        before, begun = self.num_moves, self._spent()
        self._cool(_COLD[0], _COLD[0], until=min(1.0, begun + _MEASURED))
        share = self._spent() - begun
        if self.num_moves == before or share <= 0:
            return 1
        moves = (self.num_moves - before) / share * _TRYING
        return min(_MOST_TRIALS, max(1, int(moves / (_LEAST_PER_PAIR * self._num_groups**2))))

    def _cool(self, first: float, last: float, *, until: float) -> None:
        """
        Anneal from temperature *first* to *last*, until the share *until* of the time budget is
        used.
        """
        begun = now = self._spent()
        while now < until:
            progress = (now - begun) / (until - begun)
            temperature = first * (last / first) ** progress / self._num_groups
            self._annealer.run(MOVES_AT_ONCE, hot=temperature, cold=temperature)
            self.num_moves += MOVES_AT_ONCE
            now = self._spent()
