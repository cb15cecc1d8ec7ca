"""The text of an answer as its tokens come."""

from collections.abc import Iterable

from shared.contracts.requests import Tokens
from shared.models.detokenizer import TextDecoder
from shared.models.stop import StopMatcher


class AnswerText:
    """
    Text, and where a stop string ends it.

    A function of all tokens, however they come in pieces: given those of earlier runs it goes on
    where these were left. So is the number of tokens until a stop string is complete.

    Args:
        decoder: Fresh.
        stops: Stop strings.
    """

    def __init__(self, decoder: TextDecoder, stops: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stops)
        self._can_stop = any(stops)
        self.whole = ""
        """All that may be shown so far."""

    def push(self, token_ids: Iterable[int]) -> tuple[Tokens, str, bool]:
        """
        More tokens.

        Returns:
            Those that belong to the answer, the text that they complete, and whether a stop
            string has ended it: nothing follows.
        """
        token_ids = tuple(token_ids)
        if not self._can_stop:
            return token_ids, self._shown(self._decoder.push(token_ids))[0], False
        shown = ""
        for count, token in enumerate(token_ids, start=1):
            text, stopped = self._shown(self._decoder.push((token,)))
            shown += text
            if stopped:
                return token_ids[:count], shown, True
        return token_ids, shown, False

    def end(self) -> str:
        """What was held back, when the tokens have ended; once."""
        tail, _ = self._shown(self._decoder.flush())
        held = self._matcher.flush()
        self.whole += held
        return tail + held

    def _shown(self, text: str) -> tuple[str, bool]:
        shown, stopped = self._matcher.push(text)
        self.whole += shown
        return shown, stopped
