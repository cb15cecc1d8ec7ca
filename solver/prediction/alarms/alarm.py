"""Alarms with hysteresis: raised above one threshold, cleared below another."""

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta


class AlarmChange(Enum):
    """Change of an alarm's state: raised or cleared."""

    RAISED = "raised"
    CLEARED = "cleared"


class AlarmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """
    Thresholds at which an alarm is raised and cleared.

    Raises:
        ValueError: `clear_below` is not below `raise_above`.
    """

    raise_above: Annotated[float, Meta(gt=1)] = 1.5
    clear_below: Annotated[float, Meta(gt=1)] = 1.2
    """Level below which the alarm is cleared; must be below `raise_above`."""
    patience: Annotated[int, Meta(ge=1)] = 5
    """
    Number of consecutive levels beyond a threshold after which the alarm is raised or cleared.
    """

    def __post_init__(self) -> None:
        if not self.clear_below < self.raise_above:
            raise ValueError(
                f"clear_below is {self.clear_below}: it must be below raise_above, "
                f"{self.raise_above}"
            )


class Alarm:
    """
    One alarm with hysteresis.

    Levels between the thresholds never change its state.
    """

    def __init__(self, options: AlarmOptions) -> None:
        self._options = options
        self._in_a_row = 0
        self.raised = False

    def observe(self, level: float) -> AlarmChange | None:
        """
        Process the level *level*; return the change of the alarm, or None. NaN never changes the
        alarm.
        """
        options = self._options
        beyond = level < options.clear_below if self.raised else level > options.raise_above
        self._in_a_row = self._in_a_row + 1 if beyond else 0
        if self._in_a_row < options.patience:
            return None
        self._in_a_row = 0
        self.raised = not self.raised
        return AlarmChange.RAISED if self.raised else AlarmChange.CLEARED

    def reset(self) -> AlarmChange | None:
        """Clear the alarm and drop earlier levels, because levels are no longer known."""
        was_raised, self.raised, self._in_a_row = self.raised, False, 0
        return AlarmChange.CLEARED if was_raised else None
