"""
The answer to a request, between the engine's outputs and the chunks and the final for the producer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from io import StringIO
from typing import Protocol

import msgspec

from services.agent.backends.base import EngineOutput
from shared.api.digests import chained
from shared.contracts.base import RunId, UnixTime
from shared.contracts.qos import QosClass, SloVerdict
from shared.contracts.requests import (
    UNKNOWN_TOKEN,
    FinishReason,
    Progress,
    QueuedRequest,
    RequestCompleted,
    StepDetails,
    TokenChunk,
    Tokens,
)
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
        self._whole = StringIO()

    @property
    def whole(self) -> str:
        """Text of the answer so far that may be sent to the producer."""
        return self._whole.getvalue()

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
        self._whole.write(held)
        return tail + held

    def _shown(self, text: str) -> tuple[str, bool]:
        shown, stopped = self._matcher.push(text)
        self._whole.write(shown)
        return shown, stopped


@dataclass(slots=True)
class AnswerStream:
    """
    Tokens, text, details and lateness of one answer; continues after the request's progress.

    The object has no access to the engine and the broker: `push` takes each output of the engine,
    and returns the chunk for the producer.
    """

    request: QueuedRequest
    token_ids: list[int] = field(init=False)
    """All tokens of the answer, including those of earlier runs."""
    first_token_at: UnixTime | None = field(init=False)
    last_token_at: UnixTime | None = None
    late_tokens: int = field(init=False)
    max_tbt_s: float = field(init=False)
    cached_tokens: int = field(init=False)
    """Those that the run with the first token found."""
    finish_reason: FinishReason | None = None
    digest: bytes = field(init=False)
    """Digest of the events so far, those of earlier runs included; empty without events."""
    _details: list[StepDetails] = field(init=False)
    """Details of the tokens, including those of earlier runs."""
    _text: AnswerText | None = None
    """None: the engine finds stop strings, and makes the text if there is any."""
    _given: list[str] = field(default_factory=list)
    """Parts of the text that the engine has made."""

    def __post_init__(self) -> None:
        progress = self.request.progress
        self.token_ids = list(progress.token_ids)
        self.first_token_at = progress.first_token_at
        self.late_tokens = progress.late_tokens
        self.max_tbt_s = progress.max_tbt_s or 0.0
        self.cached_tokens, self.digest = progress.cached_tokens, progress.digest
        self._details = list(progress.details)

    @property
    def text(self) -> str:
        """Text of the answer so far; empty if nothing reads it."""
        return "".join(self._given) if self._text is None else self._text.whole

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the answer so far, including those of earlier runs."""
        return len(self.token_ids)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Number of tokens so far of each answer to the request; a tuple of one number."""
        return (len(self.token_ids),)

    @property
    def details(self) -> tuple[StepDetails, ...]:
        """Details of the answer's tokens; steps after the end of the answer are left out."""
        kept, num_tokens = [], 0
        for step in self._details:
            num_tokens += step.num_tokens
            if num_tokens > len(self.token_ids):
                break
            kept.append(step)
        return tuple(kept)

    def resume(self, text: AnswerText | None, *, max_tokens: int) -> bool:
        """
        Prepare for the outputs of a run.

        Args:
            text: Makes the text and finds stop strings; None if the engine finds them.
            max_tokens: Limit of the whole answer.

        Returns:
            True if the progress is the whole answer, so that no run is needed.
        """
        stopped = self.read(text)
        if stopped or len(self.token_ids) >= max_tokens:
            self.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            if text is not None:
                text.end()
        return self.finish_reason is not None

    def read(self, text: AnswerText | None) -> bool:
        """Make the text of the answer with *text*; return whether the progress stops."""
        self._text = text
        return text is not None and text.push(self.token_ids)[2]

    def push(self, output: EngineOutput, run_id: RunId, now: UnixTime) -> TokenChunk | None:
        """
        Append an output of the engine.

        Returns:
            The chunk for the producer; None without tokens. `finish_reason` is set at the end, also
            at a stop string of which the engine does not know.
        """
        offset, token_ids, text, stopped = len(self.token_ids), output.token_ids, output.text, False
        if self._text is None:
            self._given.append(text)
        else:
            token_ids, text, stopped = self._text.push(output.token_ids)
        if not self.token_ids:
            self.cached_tokens = self.cached_tokens or output.cached_tokens
        self._append(token_ids, now)
        self._add(output.details)
        self.finish_reason = FinishReason.STOP if stopped else output.finish_reason
        if self.finish_reason is not None and self.request.pools:
            self.first_token_at = now  # the whole answer comes at once
        if self.finish_reason is not None and self._text is not None:
            text += self._text.end()
        if not token_ids:
            return None
        return TokenChunk(
            request_id=self.request.request_id,
            run_id=run_id,
            offset=offset,
            token_ids=token_ids,
            text=text,
            details=() if stopped else output.details,
        )

    def progress(self) -> Progress:
        """Progress for the next run of the request."""
        return Progress(
            token_ids=tuple(self.token_ids),
            first_token_at=self.first_token_at,
            late_tokens=self.late_tokens,
            max_tbt_s=self.max_tbt_s,
            # Without tokens the next run begins again, and returns the details of the prompt again.
            details=self._continued() if self.token_ids else (),
            cached_tokens=self.cached_tokens,
            digest=self.digest if self.token_ids else b"",
        )

    def verdict(self, *, finished_at: UnixTime) -> SloVerdict:
        """Verdict on every SLO target of the request, from the times of the tokens."""
        return verdict_of(self, finished_at=finished_at)

    def written_into(self, final: RequestCompleted) -> RequestCompleted:
        """Copy of *final* with the answer."""
        return msgspec.structs.replace(
            final, token_ids=tuple(self.token_ids), text=self.text, details=self.details
        )

    def _add(self, details: Iterable[StepDetails]) -> None:
        for step in details:
            self._details.append(step)
            if step.events:
                self.digest = chained(self.digest, step.events)

    def _continued(self) -> tuple[StepDetails, ...]:
        """
        What the next run needs of the steps: it makes the events of known tokens again. A server
        that reports no token ids makes another answer.
        """
        if not self.digest or UNKNOWN_TOKEN in self.token_ids:
            return self.details
        return tuple(StepDetails(step.num_tokens, step.parts) for step in self.details)

    def _append(self, token_ids: Tokens, now: UnixTime) -> None:
        """Compare the times of new tokens with their deadlines (QoServe eq. 2)."""
        if not token_ids:
            return
        slo, arrived_at = self.request.slo, self.request.arrived_at
        if self.last_token_at is not None:
            self.max_tbt_s = max(self.max_tbt_s, now - self.last_token_at)
        if self.first_token_at is None:
            self.first_token_at = now
        for token in token_ids:
            self.token_ids.append(token)
            self.late_tokens += now > slo.token_deadline_at(arrived_at, len(self.token_ids))
        self.last_token_at = now


class Timed(Protocol):
    """Times of an answer's tokens."""

    @property
    def request(self) -> QueuedRequest: ...

    @property
    def first_token_at(self) -> UnixTime | None: ...

    @property
    def late_tokens(self) -> int: ...

    @property
    def max_tbt_s(self) -> float: ...


def verdict_of(answer: Timed, *, finished_at: UnixTime) -> SloVerdict:
    """Verdict on every SLO target of the request, from the times of the tokens."""
    slo, arrived_at = answer.request.slo, answer.request.arrived_at
    first_at = answer.first_token_at
    attained = finished_at <= slo.completion_deadline_at(arrived_at)
    if slo.qos_class is QosClass.INTERACTIVE:
        attained &= (first_at or finished_at) <= slo.first_token_deadline_at(arrived_at)
        attained &= slo.tbt_s is None or answer.late_tokens == 0
    return SloVerdict(
        attained=attained,
        ttft_s=None if first_at is None else first_at - arrived_at,
        ttlt_s=finished_at - arrived_at,
        max_tbt_s=answer.max_tbt_s,
        late_tokens=answer.late_tokens if slo.tbt_s is not None else 0,
    )
