"""Runs of calls in the engine host."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from itertools import count
from typing import Any

import msgspec
from vllm.v1.engine.exceptions import EngineDeadError

from services.agent.backends.base import EngineCall, EngineRequest
from services.agent.backends.vllm.host.built_runs import EngineRun, built_run
from services.agent.backends.vllm.host.calls.applications import Applications
from services.agent.backends.vllm.host.calls.call_core import Answered, Child
from services.agent.backends.vllm.host.calls.events import CallEvents, Step
from services.agent.backends.vllm.host.calls.streamed_answer import StreamedAnswer
from services.agent.backends.vllm.host.engine import Engine
from services.agent.backends.vllm.shared.core_ids import answer_run
from services.agent.backends.vllm.shared.wire import CallAnswered, RunOutput, Submit
from shared.api.calls import COUNTERS
from shared.contracts.base import RequestId, UnixTime
from shared.contracts.errors import ContractError, NotActiveError
from shared.contracts.requests import FinishReason, Progress, StepDetails


class CallRun:
    """
    One run of a call: vLLM's application makes its requests, the engine runs what of their answers
    is missing, and the application makes the response of the answers.

    The inputs of a pooling model are requests also. They have no progress, and their outputs are
    not reported: one output stands for all of them, before the response.

    Args:
        request: The run.
        call: Its call.
        engine: Engine of the run's model.
        numbers: Numbers of runs in the engine's core.
        adapter_path: Directory of the run's adapter; empty without an adapter.
        parses: True if a parser reads the answers token by token.
        on_output: Called with each output of an answer.
        on_lost: Called with this run and the error if the engine has died, or if another instance
            may serve the call.
    """

    def __init__(
        self,
        request: EngineRequest,
        call: EngineCall,
        engine: Engine,
        numbers: "count[int]",
        *,
        adapter_path: str,
        parses: bool,
        on_output: Callable[[RunOutput], None],
        on_lost: Callable[["CallRun", Exception], None],
    ) -> None:
        self.run_id = request.request_id
        self.model = request.model
        self._request = request
        self._call = call
        self._engine = engine
        self._numbers = numbers
        self._adapter_path = adapter_path
        self._on_output = on_output
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._children: asyncio.Queue[Child] = asyncio.Queue()
        self._runs: list[EngineRun] = []
        self._last_prompt: tuple[int, ...] = ()
        self._events = CallEvents(self._on_step) if call.events else None
        self._joins = call.joins and not parses
        self._streamed: dict[int, StreamedAnswer] = {}
        """Index of an answer -> the answer, if its events are streamed."""
        self._steps: list[StepDetails] = []
        """Events of all steps so far, those of earlier runs included."""
        self._new_steps: deque[Step] = deque()
        """Steps that the application's thread appends; the host's takes the first."""
        self._has_ended = False
        self._broken: asyncio.Future[None] = self._loop.create_future()
        """Fails if the events cannot continue those of earlier runs."""
        self._pooled: RunOutput | None = None
        """The output that stands for all inputs so far, if the model pools."""

    @property
    def name(self) -> str:
        return self._request.origin or self._request.request_id

    @property
    def arrived_at(self) -> UnixTime:
        return self._request.arrived_at

    @property
    def events(self) -> CallEvents | None:
        return self._events

    @property
    def seed(self) -> int:
        return self._call.seed

    @property
    def tenant(self) -> str | None:
        return self._request.tenant

    def begin(self, child: Child) -> None:
        """Run a request of the application; called from the application's thread."""
        self._loop.call_soon_threadsafe(self._children.put_nowait, child)

    async def response(self, applications: Applications) -> CallAnswered:
        """
        Run the call to its response.

        Raises:
            ContractError: The events cannot continue those of earlier runs.
            Exception: vLLM's application failed.
        """
        runs = asyncio.create_task(self._run_children(), name="run the answers of a call")
        body = self._call.body if self._events is None else _streaming(self._call)
        responding = asyncio.ensure_future(
            applications.respond(self._request.model, self._call.endpoint, body, self)
        )
        try:
            ends: set[asyncio.Future[Any]] = {responding, self._broken}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
            return self._answered(*responding.result())
        finally:
            self._has_ended = True
            responding.cancel()
            runs.cancel()
            for answer in self._streamed.values():
                answer.close()
            for run in self._runs:
                await run.abort()

    def _answered(self, status: int, body: bytes) -> CallAnswered:
        """The response that the application has made."""
        name, events = self._request.request_id, self._events
        if events is not None and events.refusal is not None:
            return CallAnswered(name, *events.refusal)
        if status >= HTTPStatus.BAD_REQUEST:
            return CallAnswered(name, status, body)
        if self._pooled is not None:
            self._on_output(self._pooled)
        elif self._call.endpoint in COUNTERS:
            self._on_output(RunOutput(name, (), FinishReason.STOP.value, child=0))
        if events is None:
            return CallAnswered(name, status, body)
        rest = StepDetails(0, events=events.rest)
        return CallAnswered(name, status, b"null", (*self._steps, rest))

    def _on_step(self, step: Step) -> None:
        """Take a step of the application, from its thread."""
        self._new_steps.append(step)
        if len(self._new_steps) == 1:
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        """Take the steps that the application has made since the last time."""
        while self._new_steps and not self._has_ended:
            step = self._new_steps[0]
            try:
                self._steps.append(self._streamed[step.index].take(step))
            except ContractError as error:
                self._has_ended = True
                self._broken.set_exception(error)
            self._new_steps.popleft()

    async def _run_children(self) -> None:
        while True:
            await self._run_child(await self._children.get())

    async def _run_child(self, child: Child) -> None:
        known = () if child.pools else self._call.children
        progress = known[child.index] if child.index < len(known) else Progress()
        answer = self._begun(child, progress)
        if not child.pools:
            self._report_prompt(child)
        answer.begin()
        if progress.finish_reason is not None:
            return
        try:
            run = await built_run(
                Submit(self._request_of(child, progress), (), self._adapter_path),
                self._engine,
                self._numbers,
                on_output=answer.on_output,
                on_error=lambda _, error: answer.on_error(error),
            )
            self._runs.append(run)
            await run.begin()
        except Exception as error:  # noqa: BLE001 - the application gets every refusal of vLLM
            answer.on_error(error)

    def _begun(self, child: Child, progress: Progress) -> "ChildRun | StreamedAnswer":
        def on_lost(error: Exception) -> None:
            self._on_lost(self, error)

        if self._events is None or child.pools:
            on_output = self._gather if child.pools else self._send
            return ChildRun(child, progress, on_output=on_output, on_lost=on_lost)
        answer = self._streamed[child.index] = StreamedAnswer(
            child, progress, joins=self._joins, on_output=self._send, on_lost=on_lost
        )
        return answer

    def _gather(self, child: Child, output: RunOutput) -> None:
        """Count the output of an input into the one that stands for all inputs."""
        before = self._pooled or RunOutput(self._request.request_id, ())
        self._pooled = RunOutput(
            self._request.request_id,
            (),
            FinishReason.STOP.value,
            before.cached_tokens + output.cached_tokens,
            # The times of several inputs overlap.
            output.prefill_s if self._pooled is None else 0.0,
            child=0,
            prompt_tokens=before.prompt_tokens + len(child.prompt),
        )

    def _send(self, child: Child, output: RunOutput) -> None:
        """Send an output of a child as one of the call."""
        named = {"request_id": self._request.request_id, "child": child.index}
        self._on_output(msgspec.structs.replace(output, **named))

    def _report_prompt(self, child: Child) -> None:
        """Report the length of a prompt, unless it is that of the answer before."""
        if child.prompt != self._last_prompt:
            self._last_prompt = child.prompt
            self._send(child, RunOutput("", (), prompt_tokens=len(child.prompt)))

    def _request_of(self, child: Child, progress: Progress) -> EngineRequest:
        """The run of one answer, with the parameters that the application has made."""
        return replace(
            self._request,
            request_id=answer_run(self._request.request_id, child.index),
            origin=RequestId(f"{self._request.origin or ''}/{child.index}"),
            prompt=child.prompt,
            progress=progress.token_ids,
            payload=child.payload,
            input_lengths=(len(child.prompt),) if child.pools else (),
            call=None,
        )


class ChildRun:
    """
    Collects one answer of a call, which continues after its progress, or the output of one input of
    a pooling model.

    Args:
        child: The request for the answer.
        progress: Progress of the answer.
        on_output: Called with each output of the engine.
        on_lost: Called with the error if the engine has died, or if another instance may serve the
            call.
    """

    def __init__(
        self,
        child: Child,
        progress: Progress,
        *,
        on_output: Callable[[Child, RunOutput], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._child = child
        self._send = on_output
        self._on_lost = on_lost
        self._token_ids = list(progress.token_ids)
        self._details = list(progress.details)
        self._reason = progress.finish_reason
        self._cached_tokens = progress.cached_tokens

    def begin(self) -> None:
        """Return the answer to the application if earlier runs have completed it."""
        if self._reason is not None:
            self._complete(self._reason)

    def on_output(self, output: RunOutput) -> None:
        """Append an output of the engine; with a finish reason, the answer is complete."""
        if not self._token_ids:
            self._cached_tokens = self._cached_tokens or output.cached_tokens
        self._token_ids += output.token_ids
        self._details += output.details
        self._send(self._child, output)
        if output.finish:
            self._complete(FinishReason(output.finish))

    def on_error(self, error: Exception) -> None:
        """End the call with an error, unless its request is not at fault."""
        if isinstance(error, EngineDeadError | NotActiveError):
            self._on_lost(error)
        else:
            self._child.refuse(str(error))

    def _complete(self, reason: FinishReason) -> None:
        """Return the answer to the application."""
        self._child.answer(
            Answered(
                token_ids=tuple(self._token_ids),
                details=tuple(self._details),
                finish_reason=reason,
                cached_tokens=self._cached_tokens,
            )
        )


def _streaming(call: EngineCall) -> bytes:
    """The body of a call with the fields that ask for a stream."""
    fields = msgspec.json.decode(call.body, type=dict[str, msgspec.Raw])
    fields["stream"] = msgspec.Raw(b"true")
    if call.stream_options is not None:
        fields["stream_options"] = msgspec.Raw(call.stream_options)
    return msgspec.json.encode(fields)
