"""Executes one request on the engine, from its start to its outcome."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import msgspec
import structlog

from services.agent.aborting import give_back
from services.agent.answer import AnswerText
from services.agent.backends.base import Capability, EngineBackend, EngineCall, EngineRequest
from services.agent.call_answer import CallAnswer, CallText
from services.agent.endings import CANCELLED_ERROR, Endings
from services.agent.outbox import Outbox
from services.agent.state import AgentState, Ending, Pulled, Run
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.errors import ContractError, EngineError, NotActiveError
from shared.contracts.models import ModelEntry
from shared.contracts.qos import QosClass, Slo
from shared.contracts.requests import (
    ErrorInfo,
    QueuedRequest,
    ReplyMode,
    RunStarted,
    Sampling,
    Tokens,
)
from shared.contracts.routing import Prefill
from shared.models.tokenizer import Tokenizer
from shared.runtime.clock import Clock

log = structlog.get_logger()

MAX_CRASHES = 3
"""Number of crashes after which a request that ran alone is failed as the cause of the crashes."""
INLINE_PROMPT_LENGTH = 4096
"""
Prompt length in characters or token ids above which a thread processes the prompt.

A thread keeps the event loop free for heartbeats.
"""


class Runner:
    """
    Executes requests on the engine and streams their tokens.

    Args:
        outbox: Publishes tokens.
        endings: Handles the outcome of each run.
        tokenizers: Tokenizers by base model.
        digests: Digests of files and settings by base model.
        entries: Registry entries by base model.
        prefilled: Called when a request has its first token.
    """

    def __init__(
        self,
        *,
        state: AgentState,
        engine: EngineBackend,
        outbox: Outbox,
        endings: Endings,
        tokenizers: dict[ModelName, Tokenizer],
        digests: Mapping[ModelName, str],
        entries: dict[ModelName, ModelEntry],
        prefilled: Callable[[Prefill], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._state = state
        self._engine = engine
        self._outbox = outbox
        self._endings = endings
        self._tokenizers = tokenizers
        self._digests = digests
        self._entries = entries
        self._prefilled = prefilled
        self._clock = clock

    def begin(self, pulled: Pulled) -> Run:
        """Register a request as running; the caller has just removed it from the window."""
        run = Run(pulled=pulled, submitted_at=self._clock.now())
        self._state.runs[pulled.request.request_id] = run
        return run

    async def run(self, run: Run) -> None:
        """Execute a registered run to its outcome; the call never raises."""
        try:
            await self._execute(run)
        except Exception:
            # An ending may fail, for example if the broker rejects its message.
            log.exception("run.ending_failed", request_id=run.request.request_id)
            await give_back(self._state, run.pulled)
        finally:
            del self._state.runs[run.request.request_id]
            run.over.set()
            self._state.wake()

    async def _execute(self, run: Run) -> None:
        try:
            prompt_tokens = await self._answer(run)
        except ContractError as error:
            info = ErrorInfo(
                message=str(error), code=error.code, param=error.param, status=error.status
            )
            await self._endings.fail(run.pulled, info, run=run)
        except EngineError as error:
            await self._on_engine_error(run, error)
        except Exception as error:  # one run's error must not end the agent and all other runs
            log.exception("run.broken", request_id=run.request.request_id)
            await self._engine.abort(run.engine_id)
            info = ErrorInfo(
                message=f"the agent could not run the request: {type(error).__name__}",
                type="server_error",
                code="internal_error",
                status=500,
            )
            await self._endings.fail(run.pulled, info, run=run)
        else:
            await self._on_end(run, prompt_tokens)

    async def _answer(self, run: Run) -> int:
        """Generate the answer of a run, or the answers of a call; return the prompt's length."""
        answer = run.answer
        if isinstance(answer, CallAnswer):
            request = self._call_request(run, answer)
            await self._started(run)
            await self._generate(run, request)
            return answer.prompt_tokens
        self._check_digest(run.request)
        prompt = await self._prompt(run)
        sampling = self._sampling(run, prompt)
        await self._started(run)
        if not answer.resume(self._text_of(run.request), max_tokens=sampling.max_tokens):
            await self._generate(run, self._engine_request(run, prompt, sampling))
        return len(prompt)

    def _check_digest(self, request: QueuedRequest) -> None:
        """
        Refuse a request that a gateway rendered with other files or parsers than this engine has.

        Raises:
            EngineError: The digests differ.
        """
        model, theirs = request.model.base, request.payload.digest if request.payload else ""
        if theirs and theirs != self._digests[model]:
            raise EngineError(
                f"the gateway and this engine have different files or parsers of {model}: "
                "their registries and model directories must be equal"
            )

    async def _on_end(self, run: Run, prompt_tokens: int) -> None:
        if run.answer.finish_reason is not None:
            await self._endings.complete(run, prompt_tokens=prompt_tokens)
        elif run.ending is Ending.EVICTED:
            await self._endings.evict(run)
        elif run.ending is Ending.SWAPPED_OUT:
            await self._endings.swap_out(run)
        elif run.ending is Ending.STOPPED:
            await self._endings.stop(run.pulled)
        else:
            await self._endings.fail(run.pulled, CANCELLED_ERROR, run=run, dead_letter=False)

    async def _on_engine_error(self, run: Run, error: EngineError) -> None:
        if isinstance(error, NotActiveError):
            # The request is valid; it arrived while the active model was being changed.
            run.ending = run.ending or Ending.EVICTED
            await self._on_end(run, 0)
            return
        if not error.engine_dead:
            info = ErrorInfo(message=str(error), code="engine_refused", status=400)
            await self._endings.fail(run.pulled, info, run=run)
            return
        if run.ending in (Ending.STOPPED, Ending.CANCELLED):
            await self._on_end(run, 0)
        elif run.request.attempts.crashes + 1 >= MAX_CRASHES:
            info = ErrorInfo(
                message=f"the engine crashed {MAX_CRASHES} times while this request ran, the "
                "last time while it ran alone",
                type="server_error",
                code="poison_request",
                status=500,
            )
            await self._endings.fail(run.pulled, info, run=run)
        else:
            await self._endings.crashed(run)

    async def _prompt(self, run: Run) -> Tokens:
        request = run.request
        tokenizer = self._tokenizers[request.model.base]
        prompt = request.messages if request.prompt is None else request.prompt
        if prompt is None:
            raise ContractError("the request has neither prompt nor messages", param="prompt")
        is_chat = request.prompt is None
        if not is_chat and len(prompt) <= INLINE_PROMPT_LENGTH:
            return tokenizer.encode(prompt)
        return await asyncio.to_thread(tokenizer.encode, prompt)

    def _sampling(self, run: Run, prompt: Tokens) -> Sampling:
        """
        The request's sampling parameters, limited to the output length that the prompt leaves.
        """
        if run.request.input_lengths:
            return run.request.sampling
        entry = self._entries[run.request.model.base]
        room = entry.max_model_len - len(prompt)
        if room < 1:
            raise ContractError(
                f"prompt has {len(prompt)} tokens; {entry.name} allows "
                f"{entry.max_model_len}, including at least one generated token",
                code="context_length_exceeded",
                param="prompt",
            )
        sampling = run.request.sampling
        return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))

    async def _generate(self, run: Run, request: EngineRequest) -> None:
        """Stream the tokens of a run until the run ends."""
        if run.ending is not None:
            return  # the run ended before it reached the engine: nothing to abort
        answer, reply_to = run.answer, _stream_to(run.request)
        async for output in self._engine.generate(request):
            is_first, begins = answer.first_token_at is None, not answer.begun
            chunk = answer.push(output, run.run_id, self._clock.now())
            if isinstance(answer, CallAnswer):
                run.pulled.request = answer.with_counted_prompts(run.request)
            if chunk is not None and begins and run.on_begin is not None:
                run.on_begin()
            if chunk is not None and reply_to is not None:
                self._outbox.add_tokens(reply_to, chunk)
                # The last tokens are sent with the final reply, which uses another channel and
                # waits for them.
                if begins and answer.finish_reason is None:
                    await self._outbox.flush(reply_to)
            if is_first and answer.first_token_at is not None:
                prompt_tokens = len(request.prompt) or run.request.prompt_tokens
                await self._prefilled(prefill_of(run, prompt_tokens, output.prefill_s))
            if answer.finish_reason is not None and not output.is_last:
                await self._engine.abort(run.engine_id)
                break

    async def _started(self, run: Run) -> None:
        """Publish the start of a run, if the producer reads a stream."""
        reply_to = _stream_to(run.request)
        if reply_to is None:
            return
        offsets = run.answer.offsets
        started = RunStarted(
            request_id=run.request.request_id,
            run_id=run.run_id,
            hop=run.request.attempts.hop,
            instance_id=self._state.instance_id,
            offset=offsets[0] if offsets else 0,
            at=self._clock.now(),
            offsets=offsets if len(offsets) > 1 else (),
        )
        await self._outbox.run_started(reply_to, started)

    def _text_of(self, request: QueuedRequest) -> AnswerText | None:
        """Decoder of the answer's text; None if the producer and the engine make the text."""
        if request.payload and Capability.PAYLOAD in self._engine.identity.capabilities:
            return None
        tokenizer = self._tokenizers[request.model.base]
        return AnswerText(tokenizer.decoder(), request.sampling.stop)

    def _call_request(self, run: Run, answer: CallAnswer) -> EngineRequest:
        """
        The engine's request for a call.

        Raises:
            ContractError: The engine answers no calls.
        """
        request = run.request
        call = request.call
        if call is None or Capability.CALLS not in self._engine.identity.capabilities:
            raise ContractError(
                f"endpoint is not supported: instance {self._state.instance_id} has an engine "
                "without vLLM",
                code="unsupported_parameter",
                param="endpoint",
            )
        tokenizer = self._tokenizers[request.model.base]
        answer.resume((lambda: CallText(tokenizer.decoder())) if call.deltas else None)
        return replace(
            self._engine_request(run, (), request.sampling),
            call=EngineCall(
                endpoint=call.endpoint,
                body=bytes(call.body),
                seed=request.sampling.seed or 0,
                children=request.progress.children,
            ),
        )

    def _engine_request(self, run: Run, prompt: Tokens, sampling: Sampling) -> EngineRequest:
        """The engine's request, which continues after the request's progress."""
        request = run.request
        entry = self._entries[request.model.base]
        slo = engine_slo(request, self._clock.now())
        return EngineRequest(
            request_id=run.engine_id,
            origin=request.request_id,
            model=request.model.base,
            prompt=prompt,
            sampling=sampling,
            progress=request.progress.token_ids,
            stop_token_ids=() if sampling.ignore_eos else entry.eos_token_ids,
            slo=slo,
            arrived_at=request.arrived_at,
            importance=request.importance,
            tenant=request.tenant,
            application=request.application,
            adapter=request.model.adapter,
            payload=request.payload,
            input_lengths=request.input_lengths,
            # Checkpoint the runs that may lose their KV to interactive work, as ConServe does for
            # harvested requests.
            checkpointed=not request.input_lengths
            and (run.pulled.checkpointed or slo.qos_class is not QosClass.INTERACTIVE),
        )


def _stream_to(request: QueuedRequest) -> str | None:
    """Reply queue of a producer that reads a stream."""
    return request.reply_to if request.reply_mode is ReplyMode.STREAM else None


def prefill_of(run: Run, prompt_tokens: int, prefill_s: Seconds) -> Prefill:
    """Create the message to routers that a request has its first token now."""
    request = run.request
    return Prefill(
        request_id=request.request_id,
        tenant=request.tenant,
        prompt_tokens=prompt_tokens,
        cached_tokens=run.answer.cached_tokens,
        prefill_s=prefill_s,
        at=run.answer.first_token_at or 0.0,
        prefix=request.prefix,
    )


def engine_slo(request: QueuedRequest, now: UnixTime) -> Slo:
    """
    Targets of one run. The first token of the run is the next token that the request needs.

    A relegated request has no targets, so that it never precedes a request that can be in time.

    A request that resumes on another engine has the deadline of its next token (QoServe eq. 2). If
    that deadline has passed, the request gets the TTFT target of a new request. Relegating it would
    turn a pause into a failure, because its first token was in time.
    """
    slo = request.slo
    if request.attempts.relegated:
        return Slo()
    if slo.ttft_s is None or request.progress.first_token_at is None:
        return slo
    num_tokens = request.progress.num_tokens // request.num_answers
    next_s = slo.ttft_s + num_tokens * (slo.tbt_s or 0.0)
    again_s = now - request.arrived_at + slo.ttft_s
    return msgspec.structs.replace(slo, ttft_s=max(next_s, again_s))
