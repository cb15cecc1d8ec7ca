"""The received part of an answer, which runs extend and may repeat."""

from dataclasses import dataclass, field

from shared.contracts.base import InstanceId, RunId
from shared.contracts.requests import RunStarted, TokenChunk, Tokens


class DivergenceError(Exception):
    """A run or a final contradicts the received part of the answer."""


@dataclass(slots=True, kw_only=True)
class RunPart:
    """One run's part of one answer, as seen by the producer."""

    position: int
    """Index in the answer of the first token of the run's next chunk."""
    text_at: int | None
    """
    Position in the answer's text at which the text of the run's next chunk begins; None if unknown.
    """
    broken: bool = False
    """True after a batch of the run's tokens was lost; later tokens of the run are then ignored."""


@dataclass(slots=True)
class ReplicaRun:
    """State of one run of a request, as seen by the producer."""

    started: RunStarted
    _parts: dict[int, RunPart] = field(default_factory=dict)

    @property
    def run_id(self) -> RunId:
        return self.started.run_id

    @property
    def instance_id(self) -> InstanceId:
        return self.started.instance_id

    @property
    def hop(self) -> int:
        return self.started.hop

    def part(self, child: int, answer: "Answer") -> RunPart:
        """The run's part of an answer, which at first continues *answer* as it is now."""
        if child not in self._parts:
            offset = self.started.offset_of(child)
            self._parts[child] = RunPart(
                position=offset,
                text_at=answer.text_position(offset),
                broken=offset > len(answer.token_ids),
            )
        return self._parts[child]


@dataclass(slots=True)
class Answer:
    """
    Tokens and text of an answer that the producer has received, in order and without repetitions.
    """

    token_ids: list[int] = field(default_factory=list)
    _parts: list[str] = field(default_factory=list)
    _text_length: int = 0
    _text_length_at: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Number of tokens at a chunk boundary -> length of the text that these tokens complete."""

    def text_position(self, offset: int) -> int | None:
        """Return the text position after *offset* tokens, if known."""
        return self._text_length_at.get(offset)

    def extend(self, run: RunPart, chunk: TokenChunk) -> tuple[Tokens, str]:
        """
        Add the next chunk of *run*, which starts at `run.position`.

        Returns:
            New tokens and new text, both empty if the chunk only repeats earlier ones.

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
        Return the tokens and text that a final adds to the answer.

        Raises:
            DivergenceError: The final contradicts the answer so far.
        """
        known = len(self.token_ids)
        if tuple(self.token_ids) != token_ids[:known] or self._text_length > len(text):
            raise DivergenceError
        return token_ids[known:], self._new_text(0, text)

    def _new_text(self, at: int, text: str) -> str:
        """Return the new end of *text*, a text that starts at position *at* of the answer."""
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
