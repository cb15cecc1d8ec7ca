"""Runs of calls in the engine host."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from itertools import count

import msgspec
from vllm.v1.engine.exceptions import EngineDeadError

from services.agent.backends.base import EngineCall, EngineRequest
from services.agent.backends.vllm.host.built_runs import EngineRun, built_run
from services.agent.backends.vllm.host.calls.applications import Applications
from services.agent.backends.vllm.host.calls.call_core import Answered, Child
from services.agent.backends.vllm.host.engine import Engine
from services.agent.backends.vllm.shared.wire import RunOutput, Submit
from shared.contracts.base import RequestId
from shared.contracts.errors import NotActiveError
from shared.contracts.requests import FinishReason, Progress


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
        self._pooled: RunOutput | None = None
        """The output that stands for all inputs so far, if the model pools."""

    @property
    def seed(self) -> int:
        return self._call.seed

    @property
    def tenant(self) -> str | None:
        return self._request.tenant

    def begin(self, child: Child) -> None:
        """Run a request of the application; called from the application's thread."""
        self._loop.call_soon_threadsafe(self._children.put_nowait, child)

    async def response(self, applications: Applications) -> tuple[int, bytes]:
        """
        Run the call to its response: status and body.

        Raises:
            Exception: vLLM's application failed.
        """
        runs = asyncio.create_task(self._run_children(), name="run the answers of a call")
        try:
            status, body = await applications.respond(
                self._request.model, self._call.endpoint, self._call.body, self
            )
            if self._pooled is not None and status < HTTPStatus.BAD_REQUEST:
                self._on_output(self._pooled)
            return status, body
        finally:
            runs.cancel()
            for run in self._runs:
                await run.abort()

    async def _run_children(self) -> None:
        while True:
            await self._run_child(await self._children.get())

    async def _run_child(self, child: Child) -> None:
        known = () if child.pools else self._call.children
        progress = known[child.index] if child.index < len(known) else Progress()
        answer = ChildRun(
            child,
            progress,
            on_output=self._gather if child.pools else self._send,
            on_lost=lambda error: self._on_lost(self, error),
        )
        if not child.pools:
            self._report_prompt(child)
        if progress.finish_reason is not None:
            answer.complete(progress.finish_reason)
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
            request_id=RequestId(f"{self._request.request_id}/{child.index}"),
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
        self._cached_tokens = 0

    def on_output(self, output: RunOutput) -> None:
        """Append an output of the engine; with a finish reason, the answer is complete."""
        self._token_ids += output.token_ids
        self._details += output.details
        self._cached_tokens = self._cached_tokens or output.cached_tokens
        self._send(self._child, output)
        if output.finish:
            self.complete(FinishReason(output.finish))

    def on_error(self, error: Exception) -> None:
        """End the call with an error, unless its request is not at fault."""
        if isinstance(error, EngineDeadError | NotActiveError):
            self._on_lost(error)
        else:
            self._child.refuse(str(error))

    def complete(self, reason: FinishReason) -> None:
        """Return the answer to the application."""
        self._child.answer(
            Answered(
                token_ids=tuple(self._token_ids),
                details=tuple(self._details),
                finish_reason=reason,
                cached_tokens=self._cached_tokens,
            )
        )
