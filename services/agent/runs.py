"""Runs on the engine: prompts in, tokens out to the producers, and events to the instance."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import structlog

from services.agent.answer import AnswerStream, AnswerText
from services.agent.backends.base import (
    EngineBackend,
    EngineCall,
    EngineEvent,
    EngineLost,
    EngineOutput,
    EngineRequest,
    RunEnded,
)
from services.agent.call_answer import CallAnswer, CallText
from services.agent.outbox import Outbox
from services.agent.servable import ServableModels
from services.agent.telemetry.stored_starts import StoredStarts
from shared.broker.finals import stored_for
from shared.contracts.base import InstanceId, RequestId, RunId, Seconds, UnixTime
from shared.contracts.ends import end_with_tokens, end_without_token
from shared.contracts.errors import (
    ConnectionBrokenError,
    ContractError,
    EngineError,
    MeshError,
    NotActiveError,
)
from shared.contracts.requests import (
    ErrorInfo,
    QueuedRequest,
    ReplyMode,
    RunStarted,
    Sampling,
    Tokens,
)
from shared.contracts.routing import Prefill
from shared.contracts.stored import StoredStart
from shared.contracts.telemetry import Capability
from shared.runtime.clock import Clock
from shared.runtime.tasks import poll_until
from solver.instance.commands import Submit
from solver.instance.events import Begun, Ended, EngineDied, Event, Outgrown, Rendered, RunEnd

log = structlog.get_logger()

INLINE_PROMPT_LENGTH = 4096
"""
Prompt length in characters or token ids above which a thread processes the prompt.

A thread keeps the event loop free for heartbeats.
"""
ADAPTER_WAIT_S: Seconds = 5.0
"""Time for which a run waits for an adapter that this agent does not know."""
ADAPTER_PERIOD_S: Seconds = 0.1
Answer = AnswerStream | CallAnswer


@dataclass(slots=True, kw_only=True)
class Run:
    """One execution of a request on the engine."""

    request: QueuedRequest
    run_id: RunId
    command: Submit
    answer: Answer
    room_tokens: float
    """Length of prompt and answer from which the instance reserves more."""
    engine_id: RequestId
    """
    Id of this run on the engine; different for each run.

    Late outputs of an aborted run must not reach the next run of the same request.
    """
    stream_to: str | None
    """Reply queue of a producer that reads a stream."""
    prompt_tokens: int = 0
    """Length of the prompts; 0 until they are known."""
    prefill_s: Seconds = 0.0
    """Time of the prefill, if this run has the first token and the engine reports the time."""
    is_submitted: bool = False
    """True once the engine has the run, and reports its end."""
    has_begun: bool = False
    """True once this run has generated a token."""
    has_first: bool = False
    """True once the answer has its first token, which earlier runs may have generated."""


class Runs:
    """
    Executes `Submit` and `Abort`, and handles the events of the engine.

    Args:
        models: Tokenizers and entries of the models.
        outbox: Sends tokens.
        stored_starts: Sends starts of runs to the store.
        instance_id: Id of this instance.
        report: Receives events of runs.
        prefilled: Receives a message for routers when a request has its first token.
        spawn: Begins a task of a name; the owner of the runs ends it.
    """

    def __init__(
        self,
        *,
        engine: EngineBackend,
        models: ServableModels,
        outbox: Outbox,
        stored_starts: StoredStarts,
        instance_id: InstanceId,
        report: Callable[[Event], None],
        prefilled: Callable[[Prefill], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._models = models
        self._outbox = outbox
        self._stored_starts = stored_starts
        self._instance_id = instance_id
        self._report = report
        self._prefilled = prefilled
        self._spawn = spawn
        self._clock = clock
        self._runs: dict[RequestId, Run] = {}
        """Runs by their ids on the engine."""
        self._by_id: dict[RunId, Run] = {}
        self._last: dict[int, Run] = {}
        """Number of a held request -> its last run."""
        self._capabilities = engine.identity.capabilities

    def submit(self, command: Submit) -> None:
        """Begin a run; its events follow, `Ended` in any case."""
        request = self.with_progress(command.number, command.request)
        answer = AnswerStream(request) if request.call is None else CallAnswer(request)
        run = Run(
            request=request,
            run_id=command.run_id,
            command=command,
            answer=answer,
            room_tokens=command.room_tokens,
            engine_id=RequestId(f"{request.request_id}/{command.run_id}"),
            stream_to=request.reply_to if request.reply_mode is ReplyMode.STREAM else None,
            has_first=answer.first_token_at is not None,
        )
        self._runs[run.engine_id] = self._by_id[run.run_id] = run
        self._last[command.number] = run
        if self._models.has_adapter(request.model):
            self._begin(run)
        else:
            self._spawn(self._begin_with_adapter(run), f"begin {run.engine_id}")

    def _begin(self, run: Run) -> None:
        """Render and submit a run; an error ends it."""
        request, answer = run.request, run.answer
        with self._failing(run):
            if isinstance(answer, CallAnswer):
                self._start_call(run, answer)
                return
            prompt = request.messages if request.prompt is None else request.prompt
            if prompt is None:
                raise ContractError("the request has neither prompt nor messages", param="prompt")
            tokenizer = self._models.tokenizers[request.model.base]
            most_tokens = self._models.entries[request.model.base].max_model_len
            encode = partial(tokenizer.encode, prompt, most_tokens=most_tokens)
            if request.prompt is None or len(prompt) > INLINE_PROMPT_LENGTH:
                rendering = self._render(run, answer, encode)
                self._spawn(rendering, f"render {run.engine_id}")
            else:
                self._start(run, answer, encode())

    async def _begin_with_adapter(self, run: Run) -> None:
        """
        Begin a run when its adapter is known. Gateways may have read a newer registry; the engine
        refuses an adapter that remains unknown. After the end of the run, its model may be gone.
        """
        await poll_until(
            lambda: run.engine_id not in self._runs or self._models.has_adapter(run.request.model),
            timeout_s=ADAPTER_WAIT_S,
            period_s=ADAPTER_PERIOD_S,
        )
        if run.engine_id in self._runs:
            self._begin(run)

    def abort(self, run_id: RunId) -> None:
        """End a run; `Ended` follows."""
        run = self._by_id.get(run_id)
        if run is None:
            return
        if run.is_submitted:
            self._engine.abort(run.engine_id)
        else:
            self._end(run)

    def reserve(self, run_id: RunId, room_tokens: int) -> None:
        """Change the length from which a run reports `Outgrown`."""
        if (run := self._by_id.get(run_id)) is not None:
            run.room_tokens = room_tokens

    def lengths(self) -> dict[RunId, int]:
        """Run -> number of tokens of its answer so far."""
        return {run.run_id: run.answer.num_tokens for run in self._runs.values()}

    def last(self, number: int) -> Run | None:
        """The last run of a held request."""
        return self._last.get(number)

    def with_progress(self, number: int, request: QueuedRequest) -> QueuedRequest:
        """Copy of a held request with the progress of its runs on this instance."""
        last = self._last.get(number)
        if last is None:
            return request
        return msgspec.structs.replace(request, progress=last.answer.progress())

    def forget(self, number: int) -> None:
        """Drop the last run of a request that has left the instance."""
        self._last.pop(number, None)

    def on_events(self, events: Sequence[EngineEvent]) -> None:
        """Handle the events of one turn of the engine."""
        for event in events:
            if isinstance(event, EngineLost):
                self._report(EngineDied())
                continue
            run = self._runs.get(event.request_id)
            if run is None:
                continue
            if isinstance(event, RunEnded):
                self._end(run, event.error)
                continue
            try:
                self._push(run, event.output)
            except Exception as error:  # one run's error must not end all other runs
                log.exception("run.broken", request_id=run.request.request_id)
                self._end(run, error)
                self._engine.abort(run.engine_id)

    def _push(self, run: Run, output: EngineOutput) -> None:
        """Append an output to the answer, and report what it changes."""
        answer = run.answer
        begins = not run.has_begun
        chunk = answer.push(output, run.run_id, self._clock.now())
        if isinstance(answer, CallAnswer):
            self._count_prompts(run, answer)
        if chunk is not None:
            if begins:
                run.has_begun = True
                self._report(Begun(run_id=run.run_id))
            if run.stream_to is not None:
                self._outbox.add_tokens(run.stream_to, chunk)
                # The last tokens are sent with the final reply, which uses another channel and
                # waits for them.
                if begins and answer.finish_reason is None:
                    self._outbox.hurry(run.stream_to)
        if not run.has_first and answer.first_token_at is not None:
            run.has_first = True
            run.prefill_s = output.prefill_s
            self._prefilled(_prefill_of(run))
        if answer.finish_reason is not None:
            self._end(run)
            if not output.is_last:
                self._engine.abort(run.engine_id)
        elif run.prompt_tokens + answer.num_tokens > run.room_tokens:
            run.room_tokens = math.inf  # until the instance has reserved more
            self._report(Outgrown(run_id=run.run_id, num_tokens=answer.num_tokens))

    def _count_prompts(self, run: Run, answer: CallAnswer) -> None:
        run.prompt_tokens = answer.prompt_tokens
        counted = answer.with_counted_prompts(run.request)
        if counted is not run.request:
            run.request = counted
            self._report(Rendered(run_id=run.run_id, prompt_tokens=counted.prompt_tokens))

    def _end(self, run: Run, error: Exception | None = None) -> None:
        """Report the end of a run, once."""
        if self._runs.pop(run.engine_id, None) is None:
            return
        del self._by_id[run.run_id]
        how, info = _end_of(run.answer, error)
        self._report(
            Ended(
                run_id=run.run_id,
                how=how,
                num_tokens=run.answer.num_tokens,
                first_token_at=run.answer.first_token_at,
                prompt_tokens=run.prompt_tokens,
                error=info,
            )
        )

    @contextmanager
    def _failing(self, run: Run) -> Iterator[None]:
        """Context in which an error ends the run."""
        try:
            yield
        except MeshError as error:
            self._end(run, error)
        except Exception as error:  # one run's error must not end the agent and all other runs
            log.exception("run.broken", request_id=run.request.request_id)
            self._end(run, error)
            self._engine.abort(run.engine_id)

    async def _render(self, run: Run, answer: AnswerStream, encode: Callable[[], Tokens]) -> None:
        with self._failing(run):
            self._start(run, answer, await asyncio.to_thread(encode))

    def _start(self, run: Run, answer: AnswerStream, prompt: Tokens) -> None:
        """Submit a run whose prompt is known, unless it has ended or its answer is complete."""
        if run.engine_id not in self._runs:
            return
        run.prompt_tokens = len(prompt)
        if run.prompt_tokens != run.request.prompt_tokens:
            self._report(Rendered(run_id=run.run_id, prompt_tokens=run.prompt_tokens))
            if run.engine_id not in self._runs:
                return  # the instance has ended it, e.g. because its time was over
        sampling = self._sampling(run.request, prompt)
        self._send_start(run)
        if answer.resume(self._text_of(run.request), max_tokens=sampling.max_tokens):
            self._end(run)
        else:
            self._submit(run, self._engine_request(run, prompt, sampling))

    def _start_call(self, run: Run, answer: CallAnswer) -> None:
        """
        Submit a call.

        Raises:
            ContractError: The engine answers no calls.
        """
        request = run.request
        call = request.call
        if call is None or Capability.CALLS not in self._capabilities:
            raise ContractError(
                f"endpoint is not supported: the engine of instance {self._instance_id} answers no "
                "bodies",
                code="unsupported_parameter",
                param="endpoint",
            )
        tokenizer = self._models.tokenizers.get(request.model.base)
        if tokenizer is None or not call.deltas:
            answer.resume(None)
        else:
            answer.resume(lambda: CallText(tokenizer.decoder()))
        self._send_start(run)
        engine_call = EngineCall(
            endpoint=call.endpoint,
            body=bytes(call.body),
            streams=call.deltas or call.events,
            events=call.events,
            joins=not request.attempts.repeated,
            stream_options=bytes(call.stream_options) if call.stream_options else None,
            seed=request.sampling.seed or 0,
            children=request.progress.children,
        )
        self._submit(
            run, replace(self._engine_request(run, (), request.sampling), call=engine_call)
        )

    def _submit(self, run: Run, request: EngineRequest) -> None:
        run.is_submitted = True
        self._engine.submit(request)

    def _sampling(self, request: QueuedRequest, prompt: Tokens) -> Sampling:
        """
        The request's sampling parameters, limited to the output length that the prompt leaves.
        """
        entry = self._models.entries[request.model.base]
        room = entry.max_model_len - len(prompt)
        if room < 1:
            raise ContractError(
                f"prompt has {len(prompt)} tokens; {entry.name} allows "
                f"{entry.max_model_len}, including at least one generated token",
                code="context_length_exceeded",
                param="prompt",
            )
        max_tokens = min(request.sampling.max_tokens, room)
        return msgspec.structs.replace(request.sampling, max_tokens=max_tokens)

    def _send_start(self, run: Run) -> None:
        """Send the start of a run, if the producer reads a stream or the store keeps the final."""
        request, now = run.request, self._clock.now()
        if (tenant := stored_for(request)) is not None:
            self._stored_starts.add(
                StoredStart(tenant=tenant, request_id=request.request_id, at=now)
            )
        if run.stream_to is None:
            return
        offsets = run.answer.offsets
        started = RunStarted(
            request_id=request.request_id,
            run_id=run.run_id,
            hop=request.attempts.hop,
            instance_id=self._instance_id,
            offset=offsets[0] if offsets else 0,
            at=now,
            offsets=offsets if len(offsets) > 1 else (),
        )
        self._outbox.run_started(run.stream_to, started)

    def _text_of(self, request: QueuedRequest) -> AnswerText:
        """Decoder of the answer's text."""
        tokenizer = self._models.tokenizers[request.model.base]
        return AnswerText(tokenizer.decoder(), request.sampling.stop)

    def _engine_request(self, run: Run, prompt: Tokens, sampling: Sampling) -> EngineRequest:
        """The engine's request, which continues after the request's progress."""
        request = run.request
        entry = self._models.entries[request.model.base]
        has_begun = run.answer.first_token_at is not None or request.num_answers > 1
        first_token_by = end_without_token(request).at
        return EngineRequest(
            request_id=run.engine_id,
            origin=request.request_id,
            model=request.model.base,
            prompt=prompt,
            sampling=sampling,
            progress=request.progress.token_ids,
            stop_token_ids=() if sampling.ignore_eos else entry.eos_token_ids,
            slo=run.command.slo,
            arrived_at=request.arrived_at,
            importance=request.importance,
            tenant=request.tenant,
            application=request.application,
            adapter=request.model.adapter,
            checkpointed=run.command.checkpointed,
            expires_at=_finite(end_with_tokens(request).at),
            # The first token of any answer counts, and the engine knows single answers.
            first_token_by=None if has_begun else _finite(first_token_by),
        )


def _finite(at: UnixTime) -> UnixTime | None:
    return None if at == math.inf else at


def _end_of(answer: Answer, error: Exception | None) -> tuple[RunEnd, ErrorInfo | None]:
    """How a run has ended, and the error for its producer."""
    info = None
    match error:
        case None:
            how = RunEnd.ABORTED if answer.finish_reason is None else RunEnd.FINISHED
        case ConnectionBrokenError():
            how = RunEnd.CUT_OFF
            info = ErrorInfo(
                message=str(error), type="server_error", code="server_error", status=502
            )
        case NotActiveError():
            how = RunEnd.NOT_ACTIVE
        case EngineError(engine_dead=True):
            how = RunEnd.DIED
        case ContractError():
            how = RunEnd.REFUSED
            info = ErrorInfo(
                message=str(error),
                code=error.code,
                param=error.param,
                status=error.status,
                response=msgspec.Raw(error.response) if error.response else msgspec.UNSET,
            )
        case MeshError():
            how = RunEnd.REFUSED
            info = ErrorInfo(message=str(error), code="engine_refused", status=400)
        case _:
            how = RunEnd.BROKEN
            message = f"the agent could not run the request: {type(error).__name__}"
            info = ErrorInfo(
                message=message, type="server_error", code="internal_error", status=500
            )
    return how, info


def _prefill_of(run: Run) -> Prefill:
    """The message to routers that a request has its first token now."""
    request = run.request
    return Prefill(
        request_id=request.request_id,
        tenant=request.tenant,
        prompt_tokens=run.prompt_tokens or request.prompt_tokens,
        cached_tokens=run.answer.cached_tokens,
        prefill_s=run.prefill_s,
        at=run.answer.first_token_at or 0.0,
        prefix=request.prefix,
    )
