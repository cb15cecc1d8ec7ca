"""Executes one request on the engine, from its start to its outcome."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from services.agent.aborting import give_back
from services.agent.answer import AnswerText
from services.agent.backends.base import EngineBackend, EngineRequest
from services.agent.endings import CANCELLED_ERROR, Endings
from services.agent.outbox import Outbox
from services.agent.state import AgentState, Ending, Pulled, Run
from shared.contracts.base import ModelName, Seconds, UnixTime
from shared.contracts.errors import ContractError, EngineError, NotActiveError
from shared.contracts.models import ModelEntry
from shared.contracts.qos import QosClass, Slo
from shared.contracts.requests import (
    ErrorInfo,
    FinishReason,
    QueuedRequest,
    ReplyMode,
    RunStarted,
    Sampling,
    TokenChunk,
    Tokens,
)
from shared.contracts.routing import Prefill
from shared.models.tokenizer import Tokenizer
from shared.runtime.clock import Clock

log = structlog.get_logger()

MAX_CRASHES = 3
"""Number of crashes after which a request that ran alone counts as the cause of the crashes."""
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
        entries: dict[ModelName, ModelEntry],
        prefilled: Callable[[Prefill], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._state = state
        self._engine = engine
        self._outbox = outbox
        self._endings = endings
        self._tokenizers = tokenizers
        self._entries = entries
        self._prefilled = prefilled
        self._clock = clock

    def begin(self, pulled: Pulled) -> Run:
        """Register a request that was just taken from the window as running."""
        progress = pulled.request.progress
        run = self._state.runs[pulled.request.request_id] = Run(
            pulled=pulled,
            submitted_at=self._clock.now(),
            token_ids=list(progress.token_ids),
            details=list(progress.details),
            first_token_at=progress.first_token_at,
            late_tokens=progress.late_tokens,
            max_tbt_s=progress.max_tbt_s or 0.0,
        )
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
            prompt = await self._prompt(run)
            sampling = self._sampling(run, prompt)
            text = await self._generate(run, prompt, sampling)
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
            await self._on_end(run, text, len(prompt))

    async def _on_end(self, run: Run, text: str, prompt_tokens: int) -> None:
        if run.finish_reason is not None:
            await self._endings.complete(run, text=text, prompt_tokens=prompt_tokens)
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
            await self._on_end(run, "", 0)
            return
        if not error.engine_dead:
            info = ErrorInfo(message=str(error), code="engine_refused", status=400)
            await self._endings.fail(run.pulled, info, run=run)
            return
        if run.ending in (Ending.STOPPED, Ending.CANCELLED):
            await self._on_end(run, "", 0)
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

    async def _generate(self, run: Run, prompt: Tokens, sampling: Sampling) -> str:
        """Stream the tokens of a run until the run ends; return the whole text of the answer."""
        request = run.request
        streaming = request.reply_mode is ReplyMode.STREAM and request.reply_to is not None
        if streaming and request.reply_to is not None:
            await self._outbox.run_started(
                request.reply_to,
                RunStarted(
                    request_id=request.request_id,
                    run_id=run.run_id,
                    hop=request.attempts.hop,
                    instance_id=self._state.instance_id,
                    offset=len(run.token_ids),
                    at=self._clock.now(),
                ),
            )
        answer = AnswerText(self._tokenizers[request.model.base].decoder(), sampling.stop)
        _, _, stopped = answer.push(run.token_ids)
        if stopped or len(run.token_ids) >= sampling.max_tokens:
            run.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            answer.end()
            return answer.whole
        if run.ending is not None:
            return answer.whole  # the run ended before it reached the engine: nothing to abort
        async for output in self._engine.generate(self._engine_request(run, prompt, sampling)):
            offset = len(run.token_ids)
            token_ids, new_text, stopped = answer.push(output.token_ids)
            is_first = run.first_token_at is None and bool(token_ids)
            run.on_tokens(token_ids, self._clock.now())
            run.details += output.details
            run.cached_tokens = run.cached_tokens or output.cached_tokens
            run.finish_reason = FinishReason.STOP if stopped else output.finish_reason
            if run.finish_reason is not None:
                new_text += answer.end()
            if streaming and request.reply_to is not None and token_ids:
                chunk = TokenChunk(
                    request_id=request.request_id,
                    run_id=run.run_id,
                    offset=offset,
                    token_ids=token_ids,
                    text=new_text,
                )
                self._outbox.add_tokens(request.reply_to, chunk)
                # The last tokens are sent with the final reply, which uses another channel and
                # waits for them.
                if offset == len(request.progress.token_ids) and run.finish_reason is None:
                    await self._outbox.flush(request.reply_to)
            if is_first:
                await self._prefilled(prefill_of(run, len(prompt), output.prefill_s))
            if stopped and output.finish_reason is None:
                await self._engine.abort(run.engine_id)
                break
        return answer.whole

    def _engine_request(self, run: Run, prompt: Tokens, sampling: Sampling) -> EngineRequest:
        request = run.request
        entry = self._entries[request.model.base]
        slo = engine_slo(request, self._clock.now())
        return EngineRequest(
            request_id=run.engine_id,
            origin=request.request_id,
            model=request.model.base,
            prompt=prompt,
            sampling=sampling,
            progress=tuple(run.token_ids),
            stop_token_ids=() if sampling.ignore_eos else entry.eos_token_ids,
            slo=slo,
            arrived_at=request.arrived_at,
            importance=request.importance,
            tenant=request.tenant,
            application=request.application,
            adapter=request.model.adapter,
            payload=request.payload,
            # Runs that may lose their KV to interactive work are checkpointed: ConServe's harvested
            # requests.
            checkpointed=run.pulled.checkpointed or slo.qos_class is not QosClass.INTERACTIVE,
        )


def prefill_of(run: Run, prompt_tokens: int, prefill_s: Seconds) -> Prefill:
    """Create the message to routers that a request has its first token now."""
    request = run.request
    return Prefill(
        request_id=request.request_id,
        tenant=request.tenant,
        prompt_tokens=prompt_tokens,
        cached_tokens=run.cached_tokens,
        prefill_s=prefill_s,
        at=run.first_token_at or 0.0,
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
    next_s = slo.ttft_s + len(request.progress.token_ids) * (slo.tbt_s or 0.0)
    again_s = now - request.arrived_at + slo.ttft_s
    return msgspec.structs.replace(slo, ttft_s=max(next_s, again_s))
