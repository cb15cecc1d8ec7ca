"""An engine in a server that others run."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import structlog
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from services.agent.backends.remote.deltas import refusal
from services.agent.backends.remote.server import LOST, OK, Server
from services.agent.backends.remote.stream import events_of
from services.agent.backends.vllm.host.answer_end import AnswerEnd
from services.agent.backends.vllm.host.core_requests import CoreRequests
from services.agent.backends.vllm.host.engine import Receiver
from services.agent.backends.vllm.host.servers.token_apis import (
    CompletionsApi,
    GenerateApi,
    TokenApi,
    data_is_end,
)
from services.agent.backends.vllm.shared.wire import Attach, Submit
from shared.api.events import data_of
from shared.contracts.errors import EngineError, NotActiveError
from shared.runtime.http.failures import failure_reason

log = structlog.get_logger()
_KNOWN = "headway_known_tokens"
"""
Key of `extra_args`: number of tokens that begin the answer and that earlier runs have sent.
"""


class ServerRequests(CoreRequests):
    """
    Requests for a server of others.

    A greedy answer continues after its progress. Other answers depend on the state of a random
    generator or on counts of tokens, which only a run from the answer's start has; such a run is
    begun again with its seed, and the tokens of the progress are left out.
    """

    def build(
        self, command: Submit, core_id: str, adapter: LoRARequest | None = None
    ) -> tuple[EngineCoreRequest | None, AnswerEnd]:
        built, end = super().build(command, core_id, adapter)
        known = len(command.request.progress)
        if built is None or not known or _continues(built.sampling_params):
            return built, end
        whole = msgspec.structs.replace(command, request=replace(command.request, progress=()))
        again, _ = super().build(whole, core_id, adapter)
        if again is not None:
            again.sampling_params.extra_args[_KNOWN] = known
        return again, end


def _continues(params: SamplingParams) -> bool:
    """True if the next token of an answer depends on the tokens before only."""
    # These read the tokens of the answer alone, and would not see those in the prompt.
    reading = (
        *(params.presence_penalty, params.frequency_penalty, params.structured_outputs),
        *(params.bad_words, params.repetition_detection, params.thinking_token_budget),
    )
    return params.temperature == 0 and not any(reading)


class ServerEngine:
    """
    The model of one server. Adapters are those that the server has, under their names there.

    The instance's backend watches the server's health, so that a lost connection ends one request.

    Args:
        attached: The server and what it can do.
        requests: Builds the requests of the model.
    """

    def __init__(self, attached: Attach, requests: ServerRequests) -> None:
        self.requests: CoreRequests = requests
        self._attached = attached
        self._server = Server(attached.remote)
        self._api: TokenApi = GenerateApi() if attached.generates else CompletionsApi()
        self._runs: dict[str, asyncio.Task[None]] = {}

    async def tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def adapter(self, command: Submit, core_id: str) -> LoRARequest | None:  # noqa: ARG002 - `Engine`'s
        name = command.request.adapter
        return None if name is None else LoRARequest(name, 1, command.adapter_path or name)

    @contextmanager
    def giving_back(self, *core_ids: str) -> Iterator[None]:  # noqa: ARG002 - `Engine`'s
        yield

    def give_back(self, core_id: str) -> None:
        """No-op: the server loads its adapters itself."""

    async def submit(self, request: Any, receiver: Receiver) -> None:
        name = request.request_id
        task = asyncio.create_task(self._run(request, receiver), name=f"run {name}")
        self._runs[name] = task
        task.add_done_callback(lambda _: self._runs.pop(name, None))

    async def abort(self, request_id: str) -> None:
        if (task := self._runs.pop(request_id, None)) is not None:
            task.cancel()  # closes the connection, which ends the request at the server

    async def close(self) -> None:
        """End all requests and close all connections."""
        for request_id in tuple(self._runs):
            await self.abort(request_id)
        await self._server.close()

    async def _run(self, request: EngineCoreRequest, receiver: Receiver) -> None:
        try:
            async for output in self._outputs(request):
                if receiver.on_output(output) or output.finished:
                    return
        except LOST as error:
            receiver.on_error(NotActiveError(f"the connection broke: {failure_reason(error)}"))
        except Exception as error:  # noqa: BLE001 - the receiver gets the reason
            receiver.on_error(error)

    async def _outputs(self, request: EngineCoreRequest) -> AsyncIterator[EngineCoreOutput]:
        """
        Outputs of *request* as they arrive. The last one waits for the end of the stream, which
        says how many tokens of the prompt were cached.

        Raises:
            MeshError: The server refuses the request, fails or ends the stream too early.
            ValueError: The server's API does not carry a part of the request.
            Exception: One of `LOST`: the connection broke.
        """
        known = (request.sampling_params.extra_args or {}).pop(_KNOWN, 0)
        last: EngineCoreOutput | None = None
        async with self._server.posted(self._api.path, self._body(request)) as response:
            if response.status != OK:
                raise refusal(response.status, await response.read())
            async for events in events_of(response):
                for event in events:
                    output = self._output(request, data_of(event))
                    if output is None:
                        continue
                    if last is not None:
                        last.prefill_stats = output.prefill_stats
                        continue
                    known -= _dropped(output, known)
                    if output.finished:
                        last = output
                    elif output.new_token_ids:
                        yield output
        if last is None:
            raise EngineError("the server ended the stream before the answer")
        yield last

    def _output(self, request: EngineCoreRequest, data: bytes) -> EngineCoreOutput | None:
        return None if data_is_end(data) else self._api.output(request, data)

    def _body(self, request: EngineCoreRequest) -> bytes:
        """
        Body of *request* for the server's API.

        Raises:
            ValueError: The server's API does not carry a part of the request.
        """
        if request.mm_features:
            raise ValueError("images are not sent to a server of others in tokens")
        adapter = request.lora_request
        body = self._api.body(request)
        body["model"] = self._attached.served if adapter is None else adapter.lora_name
        if self._attached.orders:
            body["priority"] = request.priority
        return msgspec.json.encode(body)


def _dropped(output: EngineCoreOutput, known: int) -> int:
    """Remove the first *known* tokens of an output, or all of them; return their number."""
    num = min(known, len(output.new_token_ids))
    if num:
        output.new_token_ids = output.new_token_ids[num:]
        logprobs = output.new_logprobs
        if logprobs is not None:
            left = len(output.new_token_ids)
            output.new_logprobs = logprobs.slice_request(num, left) if left else None
    return num
