"""Text of an answer, built incrementally from its tokens."""

from collections.abc import Iterable

from shared.contracts.requests import Tokens
from shared.models.stop import StopMatcher
from shared.models.tokenizer import TextDecoder


class AnswerText:
    """
    Text of an answer, cut at the first stop string.

    The text and the number of its tokens depend only on the sequence of tokens, not on how calls of
    `push` divide it. A resumed run first pushes the tokens of earlier runs.

    Args:
        decoder: A decoder in its initial state.
    """

    def __init__(self, decoder: TextDecoder, stops: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stops)
        self._can_stop = any(stops)
        self.whole = ""
        """Text of the answer so far that may be sent to the producer."""

    def push(self, token_ids: Iterable[int]) -> tuple[Tokens, str, bool]:
        """
        Append tokens to the answer.

        Returns:
            Tokens that belong to the answer, the text that they complete, and whether a stop
            string has ended the answer.
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
        """
        Return the text that was held back as a possible stop string; call once, after the last
        token.
        """
        tail, _ = self._shown(self._decoder.flush())
        held = self._matcher.flush()
        self.whole += held
        return tail + held

    def _shown(self, text: str) -> tuple[str, bool]:
        shown, stopped = self._matcher.push(text)
        self.whole += shown
        return shown, stopped
