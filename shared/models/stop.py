"""Detection of stop strings in streamed text."""

from collections.abc import Sequence


class StopMatcher:
    """
    Passes text through until one of the stop strings *stops* is complete.

    The answer is cut before the stop string that is complete first; if several stop strings end at
    the same character, before the longest of them. The result does not depend on how the text is
    divided. Empty stop strings are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """
        Return the text that can be sent to the producer, and whether a stop string ended the
        answer.

        Text that may be the beginning of a stop string is held back. After a stop string the text
        is empty.
        """
        if self._stopped:
            return "", True
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at = min(found)
            self._held, self._stopped = "", True
            return text[:at], True
        kept = self._num_held(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], False

    def flush(self) -> str:
        """Return the text that was held back; call when the answer ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - count :]) for stop in self._stops):
                return count
        return 0
