"""When a batch will probably end, from the times at which its lines have ended."""

from bisect import bisect_right

from shared.contracts.base import Seconds, UnixTime

MAX_SAMPLES = 512
"""Maximum number of observed counts that are kept."""
LEAST_LINES = 3
"""Number of lines that must have ended before there is an estimate."""
LEAST_WINDOW_S: Seconds = 15.0
"""Least length of the window of observed ends, if that much time has passed."""
HORIZON_SHARE = 1.0
"""
Length of the window of observed ends, as a part of the time that is left: the load of the near
future is like that of the near past, and for a far end changes of load average out.
"""
PRIOR_LINES = 60.0
"""Weight of the rate since the first end, in lines of the window, against chance in short ones."""
RESULTS_S_PER_LINE: Seconds = 0.0005
"""Time to write the result of a line, before a batch has ended."""
_NEWEST_SHARE = 0.5
"""Weight of the batch that ended last; the batches before it share the rest."""


class ResultPace:
    """Predicts how long it takes to write the results of a batch, from batches that have ended."""

    def __init__(self) -> None:
        self._per_line_s = RESULTS_S_PER_LINE

    def observe(self, *, num_lines: int, elapsed_s: Seconds) -> None:
        """
        Learn from a batch whose results took *elapsed_s* to write; a negative time, after the clock
        was set back, is ignored.
        """
        if num_lines and elapsed_s >= 0.0:
            self._per_line_s += _NEWEST_SHARE * (elapsed_s / num_lines - self._per_line_s)

    def expected_s(self, num_lines: int) -> Seconds:
        """Time from the last line's end to the batch's end."""
        return num_lines * self._per_line_s


class ExpectedEnd:
    """
    Estimates the end of one batch.

    The rate of ends is measured over a window as long as the time that is left, and shrunk towards
    the rate since the first end. The time before the first end, in which the first lines are
    published and served, does not count.

    Args:
        num_lines: Number of lines of the batch.
        num_ended: Lines that have ended at *now*.
        now: Unix time in seconds.
        results_s: Time from the last line's end to the batch's end, in which results are written.
    """

    def __init__(
        self, *, num_lines: int, num_ended: int, now: UnixTime, results_s: Seconds = 0.0
    ) -> None:
        self._num_lines = num_lines
        self._results_s = results_s
        self._times: list[UnixTime] = [now]
        self._ended: list[int] = [num_ended]

    def observe(self, num_ended: int, now: UnixTime) -> None:
        """Record how many lines have ended; a time not after the last one's is ignored."""
        if now <= self._times[-1]:
            return
        if num_ended == self._ended[0] and len(self._times) == 1:
            self._times[0] = now
            return
        self._times.append(now)
        self._ended.append(num_ended)
        if len(self._times) > MAX_SAMPLES:
            # The first sample and the newest ones stay; the distance of older ones doubles.
            half = MAX_SAMPLES // 2
            self._times[:half] = self._times[:half:2]
            self._ended[:half] = self._ended[:half:2]

    @property
    def rate_per_s(self) -> float | None:
        """Ends in a second that are expected from now on; None without enough ends."""
        elapsed_s = self._times[-1] - self._times[0]
        num_ended = self._ended[-1] - self._ended[0]
        if num_ended < LEAST_LINES or elapsed_s <= 0.0:
            return None
        overall = num_ended / elapsed_s
        left_s = (self._num_lines - self._ended[-1]) / overall
        window_s = min(elapsed_s, max(LEAST_WINDOW_S, HORIZON_SHARE * left_s))
        in_window = self._ended[-1] - self._ended_at(self._times[-1] - window_s)
        return (in_window + PRIOR_LINES) / (window_s + PRIOR_LINES / overall)

    def expected_at(self) -> UnixTime | None:
        """Unix time of the expected end; None without enough ends."""
        rate = self.rate_per_s
        if rate is None:
            return None
        lines_end_at = self._times[-1] + (self._num_lines - self._ended[-1]) / rate
        return lines_end_at + self._results_s

    def _ended_at(self, at: UnixTime) -> float:
        """Number of lines that had ended at a time, interpolated between samples."""
        after = bisect_right(self._times, at)
        if after == 0:
            return self._ended[0]
        if after == len(self._times):
            return self._ended[-1]
        share = (at - self._times[after - 1]) / (self._times[after] - self._times[after - 1])
        before = self._ended[after - 1]
        return before + share * (self._ended[after] - before)
