"""The answers to a call, between the engine's outputs and the chunks and the final."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from services.agent.answer import AnswerStream, AnswerText, verdict_of
from services.agent.backends.base import EngineOutput
from shared.contracts.base import RunId, UnixTime
from shared.contracts.qos import SloVerdict
from shared.contracts.requests import (
    ChildAnswer,
    FinishReason,
    Progress,
    QueuedRequest,
    RequestCompleted,
    StepDetails,
    TokenChunk,
)
from shared.models.tokenizer import TextDecoder


class CallText(AnswerText):
    """
    Text of one answer of a call.

    The engine host finds stop strings. As in vLLM, an unfinished character at the end is left out.
    """

    def __init__(self, decoder: TextDecoder) -> None:
        super().__init__(decoder, ())

    def end(self) -> str:
        return ""


@dataclass(slots=True)
class CallAnswer:
    """
    Answers of one call, each of which continues after its progress, and the response at the end.

    It has the interface of `AnswerStream`, whose figures it joins over the answers.
    """

    request: QueuedRequest
    children: list[AnswerStream] = field(init=False)
    prompt_tokens: int = 0
    """Length of the prompts that this run has rendered; a prompt of several answers counts once."""
    response: bytes | None = None
    events: tuple[StepDetails, ...] = ()
    """Events of the server's stream, if a server streams the answer itself."""
    _new_text: Callable[[], CallText] | None = None

    def __post_init__(self) -> None:
        self.children = [self._child(each) for each in self.request.progress.children]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all answers so far, including those of earlier runs."""
        return sum(each.num_tokens for each in self.children)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Number of tokens of each answer so far."""
        return tuple(each.num_tokens for each in self.children)

    @property
    def first_token_at(self) -> UnixTime | None:
        times = [each.first_token_at for each in self.children if each.first_token_at is not None]
        return min(times, default=None)

    @property
    def late_tokens(self) -> int:
        return sum(each.late_tokens for each in self.children)

    @property
    def max_tbt_s(self) -> float:
        return max((each.max_tbt_s for each in self.children), default=0.0)

    @property
    def cached_tokens(self) -> int:
        return sum(each.cached_tokens for each in self.children)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason for which the first answer ended; None until the response is there."""
        if self.response is None or not self.children:
            return None
        return self.children[0].finish_reason

    def resume(self, new_text: Callable[[], CallText] | None) -> None:
        """
        Prepare for the outputs of a run.

        Args:
            new_text: Makes the object that makes the text of an answer; None: chunks have no text.
        """
        self._new_text = new_text
        for each in self.children:
            self._read(each)

    def push(self, output: EngineOutput, run_id: RunId, now: UnixTime) -> TokenChunk | None:
        """
        Append an output of the engine.

        Returns:
            The chunk for the producer; None without tokens.
        """
        if output.child is None:
            self.response, self.events = output.response, output.details
            return None
        while len(self.children) <= output.child:
            self.children.append(self._child(Progress()))
            self._read(self.children[-1])
        self.prompt_tokens += output.prompt_tokens
        if not (output.token_ids or output.text or output.finish_reason):
            return None  # the prompt was rendered; the answer may be complete already
        chunk = self.children[output.child].push(output, run_id, now)
        if chunk is None:
            return None
        details = tuple(StepDetails(step.num_tokens, events=step.events) for step in chunk.details)
        return msgspec.structs.replace(chunk, child=output.child, details=details)

    def with_counted_prompts(self, request: QueuedRequest) -> QueuedRequest:
        """Copy of *request* with the length of its prompts, once all of them were rendered."""
        is_counted = len(self.children) >= request.num_answers and self.prompt_tokens > 0
        if not is_counted or request.prompt_tokens == self.prompt_tokens:
            return request
        return msgspec.structs.replace(request, prompt_tokens=self.prompt_tokens)

    def progress(self) -> Progress:
        """Progress for the next run of the request."""
        return Progress(
            first_token_at=self.first_token_at,
            children=tuple(
                msgspec.structs.replace(each.progress(), finish_reason=each.finish_reason)
                for each in self.children
            ),
        )

    def written_into(self, final: RequestCompleted) -> RequestCompleted:
        """
        Copy of *final* with the response and the answers.

        The final of a producer that sent no body has the text of its answer instead.
        """
        if self.request.call is not None and self.request.call.plain and self.children:
            whole = self.children[0]
            return msgspec.structs.replace(final, token_ids=tuple(whole.token_ids), text=whole.text)
        children = tuple(
            ChildAnswer(
                token_ids=tuple(each.token_ids),
                text=each.text,
                finish_reason=each.finish_reason or FinishReason.STOP,
            )
            for each in self.children
        )
        response = msgspec.Raw(self.response or b"null")
        return msgspec.structs.replace(
            final, response=response, children=children, details=self.events
        )

    def verdict(self, *, finished_at: UnixTime) -> SloVerdict:
        """Verdict on every SLO target of the request, from the times of all tokens."""
        return verdict_of(self, finished_at=finished_at)

    def _child(self, progress: Progress) -> AnswerStream:
        stream = AnswerStream(msgspec.structs.replace(self.request, progress=progress))
        stream.finish_reason = progress.finish_reason
        return stream

    def _read(self, child: AnswerStream) -> None:
        if self._new_text is not None:
            child.read(self._new_text())
