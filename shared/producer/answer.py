"""The answer as far as it is known: tokens and text, grown by runs that may repeat each other."""

from dataclasses import dataclass, field

from shared.contracts.base import InstanceId, RunId
from shared.contracts.requests import TokenChunk, Tokens


class DivergenceError(Exception):
    """A run or final contradicts what is already part of the answer."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of the request, as its producer sees it."""

    run_id: RunId
    instance_id: InstanceId
    hop: int
    position: int
    """Index of the token that its next chunk must start at."""
    text_at: int | None
    """Where in the answer's text its next chunk's text belongs; None when that is unknown."""
    broken: bool = False
    """A batch of it was lost; nothing more can be streamed from it."""


@dataclass(slots=True)
class Answer:
    """Tokens and text in order, each position once."""

    token_ids: list[int] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)
    _text_length: int = 0
    _text_length_at: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Number of tokens -> length of the text that they complete, at chunk borders."""

    def text_position(self, offset: int) -> int | None:
        """Where the text after *offset* tokens begins, if that is known."""
        return self._text_length_at.get(offset)

    def extend(self, run: Run, chunk: TokenChunk) -> tuple[Tokens, str]:
        """
        Take the next chunk of *run*, which starts at `run.position`.

        Returns:
            Tokens and text that were not known before; both empty for a pure repetition.

        Raises:
            DivergenceError: The chunk contradicts the answer.
        """
        start, known = chunk.offset, len(self.token_ids)
        repeated = min(max(known - start, 0), len(chunk.token_ids))
        if tuple(self.token_ids[start : start + repeated]) != chunk.token_ids[:repeated]:
            raise DivergenceError
        text = "" if run.text_at is None else self._new_text(run.text_at, chunk.text)
        tokens = chunk.token_ids[repeated:]
        self.token_ids.extend(tokens)
        run.position = start + len(chunk.token_ids)
        if run.text_at is not None:
            run.text_at += len(chunk.text)
            self._text_length_at[run.position] = run.text_at
        return tokens, text

    def complete(self, token_ids: Tokens, text: str) -> tuple[Tokens, str]:
        """
        What a final adds.

        Raises:
            DivergenceError: The final contradicts the answer so far.
        """
        known = len(self.token_ids)
        if tuple(self.token_ids) != token_ids[:known] or self._text_length > len(text):
            raise DivergenceError
        return token_ids[known:], self._new_text(0, text)

    def _new_text(self, at: int, text: str) -> str:
        """The end of *text*, which belongs at *at*, that goes beyond what is known."""
        overlap = self._text_length - at
        if overlap > 0:
            known = "".join(self._parts)
            self._parts = [known]
            if not text.startswith(known[at : at + len(text)]):
                raise DivergenceError
        new = text[overlap:]
        if new:
            self._parts.append(new)
            self._text_length += len(new)
        return new
