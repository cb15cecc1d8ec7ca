"""One run of a body at the simulated engine: its answers, their events, and the response."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from services.agent.backends.base import EngineCall, EngineOutput, EngineRequest
from services.agent.backends.bodies.asked import Asked, asked_of
from services.agent.backends.bodies.events import (
    Events,
    Heading,
    Usage,
    events_for,
)
from services.agent.backends.checks import check_request, finished_already
from shared.api.events import response_of_stream
from shared.contracts.base import RequestId
from shared.contracts.errors import ContractError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import (
    FinishReason,
    Progress,
    Sampling,
    StepDetails,
    Tokens,
    steps_of,
)
from shared.models.stop import StopMatcher
from shared.models.tokenizer import TextDecoder, Tokenizer


@dataclass(slots=True, kw_only=True)
class _Answer:
    """One answer of a call."""

    index: int
    request: EngineRequest
    """The run of the answer at the engine, with the progress of earlier runs."""
    text: TextDecoder
    stops: StopMatcher
    num_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class BodyRun:
    """
    Makes the prompts of a body, and the events and the response of its answers.

    A run that continues earlier ones makes their events again, and leaves them out.

    Args:
        request: The run, with its call.
        call: Its call.
        entry: The model.
        tokenizer: The model's tokenizer.
        vocab_size: Exclusive upper bound of token ids; None: token ids are not checked.

    Raises:
        ContractError: The body is invalid.
        EngineError: A prompt does not fit.
    """

    request: EngineRequest
    call: EngineCall
    entry: ModelEntry
    tokenizer: Tokenizer
    vocab_size: int | None
    _answers: list[_Answer] = field(init=False)
    _events: Events = field(init=False)
    _made: list[bytes] = field(default_factory=list)
    """All events so far, those of earlier runs included."""
    _steps: list[StepDetails] = field(default_factory=list)
    """The events that were sent, with the numbers of their tokens."""
    _tail: list[bytes] = field(default_factory=list)
    """Events at the ends of answers, which are sent with the final."""

    def __post_init__(self) -> None:
        call = self.call
        asked = asked_of(call.endpoint, call.body, call.stream_options)
        self._answers = [
            self._answer(index, prompt, sampling)
            for index, (prompt, sampling) in enumerate(self._prompts(asked))
        ]
        self._events = events_for(
            call.endpoint,
            Heading(
                request_id=self.request.origin or self.request.request_id,
                model=asked.model or self.request.model,
                created_at=int(self.request.arrived_at),
                tool=asked.tool,
                includes_usage=asked.includes_usage or not call.streams,
            ),
        )
        for answer in self._answers:
            self._replay(answer)

    def missing(self) -> list[EngineRequest]:
        """The runs of the answers that are not complete."""
        return [each.request for each in self._answers if each.finish_reason is None]

    def opening(self) -> list[EngineOutput]:
        """Outputs before the first token: the length of each prompt, and the end if all is done."""
        outputs, last = [], None
        for answer in self._answers:
            prompt = answer.request.prompt
            num_tokens = 0 if prompt is last else len(prompt)
            outputs.append(EngineOutput(token_ids=(), child=answer.index, prompt_tokens=num_tokens))
            last = prompt
        return [*outputs, *self._end()]

    def push(self, index: int, output: EngineOutput) -> list[EngineOutput]:
        """
        Take new tokens of an answer; the answer may be complete before the engine ends it.

        Returns:
            Outputs of the call; the last has the response, once all answers are complete.
        """
        answer = self._answers[index]
        answer.cached_tokens = answer.cached_tokens or output.cached_tokens
        sent = self._advance(answer, output.token_ids, output.finish_reason)
        step = StepDetails(len(output.token_ids), events=sent, child=index)
        if self.call.streams:
            self._steps.append(step)
        new = msgspec.structs.replace(
            output,
            child=index,
            finish_reason=answer.finish_reason,
            details=(step,) if self.call.streams else (),
        )
        return [new, *self._end()]

    def is_complete(self, index: int) -> bool:
        """True once an answer has ended, e.g. at a stop string that the engine does not know."""
        return self._answers[index].finish_reason is not None

    def _prompts(self, asked: Asked) -> Iterator[tuple[Tokens, Sampling]]:
        """Prompt and parameters of each answer, in the response's order."""
        most = self.entry.max_model_len
        for prompt in asked.prompts:
            tokens = self.tokenizer.encode(prompt, most_tokens=most)
            room = most - len(tokens)
            if not tokens or room < 1:
                raise ContractError(
                    f"the prompt has {len(tokens)} tokens; {self.entry.name} allows 1 to {most - 1}"
                    ", and one generated token at least",
                    code="context_length_exceeded",
                    param="prompt" if isinstance(prompt, str) else "messages",
                )
            limit = room if asked.max_tokens is None else asked.max_tokens
            if limit > room:
                raise ContractError(
                    f"max_tokens is {limit}, and the prompt has {len(tokens)} tokens: "
                    f"{self.entry.name} allows {most} together",
                    code="context_length_exceeded",
                    param="max_tokens",
                )
            for number in range(asked.num_answers):
                seed = asked.sampling.seed
                yield (
                    tokens,
                    msgspec.structs.replace(
                        asked.sampling,
                        max_tokens=limit,
                        min_tokens=min(limit, asked.sampling.min_tokens),
                        seed=(self.call.seed if seed is None else seed) + number,
                    ),
                )

    def _answer(self, index: int, prompt: Tokens, sampling: Sampling) -> _Answer:
        known = self.call.children
        progress = known[index] if index < len(known) else Progress()
        request = replace(
            self.request,
            request_id=RequestId(f"{self.request.request_id}/{index}"),
            origin=RequestId(f"{self.request.origin or ''}/{index}"),
            prompt=prompt,
            progress=progress.token_ids,
            sampling=sampling,
            call=None,
        )
        check_request(self.entry, replace(request, progress=()), self.vocab_size)
        return _Answer(
            index=index,
            request=request,
            text=self.tokenizer.decoder(),
            stops=StopMatcher(sampling.stop),
        )

    def _replay(self, answer: _Answer) -> None:
        """Make the events of the tokens of earlier runs again."""
        known = self.call.children
        if answer.index >= len(known) or not known[answer.index].token_ids:
            return
        progress = known[answer.index]
        reason = progress.finish_reason or finished_already(self.entry, answer.request)
        for token_ids in steps_of(progress):
            is_last = answer.num_tokens + len(token_ids) == len(progress.token_ids)
            sent = self._advance(answer, token_ids, reason if is_last else None)
            if self.call.streams:
                self._steps.append(StepDetails(len(token_ids), events=sent, child=answer.index))

    def _advance(self, answer: _Answer, token_ids: Tokens, reason: FinishReason | None) -> bytes:
        """Append tokens to an answer; return the events that are sent with them."""
        sent = [] if answer.num_tokens else [self._events.begin(answer.index)]
        answer.num_tokens += len(token_ids)
        text, stopped = answer.stops.push(answer.text.push(token_ids))
        if reason is not None and not stopped:
            rest, stopped = answer.stops.push(answer.text.flush())
            text += rest + answer.stops.flush()
        answer.finish_reason = FinishReason.STOP if stopped else reason
        if text:
            sent.append(self._events.text(answer.index, text))
        self._made += sent
        if answer.finish_reason is not None:
            end = self._events.end(answer.index, answer.finish_reason)
            self._made.append(end)
            self._tail.append(end)
        return b"".join(sent)

    def _end(self) -> list[EngineOutput]:
        """The last output, once all answers are complete."""
        if any(answer.finish_reason is None for answer in self._answers):
            return []
        close = self._events.close(self._usage())
        self._tail.append(close)
        tail = StepDetails(0, events=b"".join(self._tail))
        details = (*self._steps, tail) if self.call.streams else ()
        response = b"null" if self.call.events else self._response(close)
        return [EngineOutput(token_ids=(), response=response, details=details)]

    def _response(self, close: bytes) -> bytes:
        return response_of_stream(self.call.endpoint, b"".join((*self._made, close)))

    def _usage(self) -> Usage:
        prompts = {id(each.request.prompt): len(each.request.prompt) for each in self._answers}
        return Usage(
            prompt=sum(prompts.values()),
            cached=sum(each.cached_tokens for each in self._answers),
            completion=sum(each.num_tokens for each in self._answers),
        )
