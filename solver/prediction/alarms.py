"""Alarms that do not flap: raised above one threshold, cleared below another."""

from dataclasses import dataclass
from enum import Enum


class AlarmChange(Enum):
    """What became of an alarm."""

    RAISED = "raised"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmOptions:
    """
    When an alarm is raised and cleared.

    Raises:
        ValueError: No band is between the thresholds, or no level is needed.
    """

    raise_above: float = 1.5
    clear_below: float = 1.2
    patience: int = 5
    """Levels in a row that it takes, either way."""

    def __post_init__(self) -> None:
        if not self.clear_below < self.raise_above:
            raise ValueError(
                f"clear_below is {self.clear_below}: it has to be below raise_above, "
                f"{self.raise_above}"
            )
        if self.patience < 1:
            raise ValueError(f"patience is {self.patience}: it has to be at least 1")


class Alarm:
    """
    One alarm with hysteresis.

    Between the thresholds nothing changes, however long and wherever the levels go.

    Args:
        options: Thresholds.
    """

    def __init__(self, options: AlarmOptions) -> None:
        self._options = options
        self._in_a_row = 0
        self.raised = False

    def observe(self, level: float) -> AlarmChange | None:
        """Whether *level* changes it; one that is no number never does."""
        options = self._options
        beyond = level < options.clear_below if self.raised else level > options.raise_above
        self._in_a_row = self._in_a_row + 1 if beyond else 0
        if self._in_a_row < options.patience:
            return None
        self._in_a_row = 0
        self.raised = not self.raised
        return AlarmChange.RAISED if self.raised else AlarmChange.CLEARED

    def reset(self) -> AlarmChange | None:
        """Begin anew, since there is nothing to tell it by any more."""
        was_raised, self.raised, self._in_a_row = self.raised, False, 0
        return AlarmChange.CLEARED if was_raised else None
