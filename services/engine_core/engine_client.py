"""vLLM's asynchronous engine without an engine process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Protocol

import structlog
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

log = structlog.get_logger()

_OUTPUTS_IN_A_ROW = 16
"""Number of outputs that are processed before other tasks have their turn."""
Fail = Callable[[str, Exception], None]
"""Ends one request of the API server with an error."""


class CoreClient(Protocol):
    """vLLM's client of an engine core, with one more method."""

    def add_request_async(self, request: EngineCoreRequest) -> Awaitable[None]: ...

    def get_output_async(self) -> Awaitable[EngineCoreOutputs]:
        """The next outputs; never raises."""

    def abort_requests_async(self, request_ids: list[str]) -> Awaitable[None]:
        """End requests whose answer is complete for vLLM, e.g. at a stop string."""

    def cancel(self, request_ids: Iterable[str]) -> Awaitable[None]:
        """End requests whose client has left."""


class CheckedInputs(InputProcessor):  # type: ignore[misc]  # as below
    """
    vLLM's input processor, whose check of a grammar does not stop the event loop: a regex of 100 KB
    takes a second on a busy machine.
    """

    def __init__(self, config: VllmConfig, renderer: BaseRenderer) -> None:
        super().__init__(config, renderer)
        self._numbers = count()
        self._checked: dict[int, Any] = {}
        """Identity of parameters that were checked -> the result of the check."""

    def assign_request_id(self, request: EngineCoreRequest) -> None:
        """Give *request* an id of its own, since two runs of a request may overlap."""
        request.external_req_id = request.request_id
        request.request_id = f"{request.external_req_id}-{next(self._numbers):x}"

    @asynccontextmanager
    async def checked(
        self, params: SamplingParams | PoolingParams, tasks: tuple[Any, ...]
    ) -> AsyncIterator[None]:
        """
        Context in which *params* are checked.

        Raises:
            Exception: An error of vLLM: they are not valid.
        """
        has_grammar = isinstance(params, SamplingParams) and params.structured_outputs is not None
        if not has_grammar:
            yield
            return
        validate = super()._validate_params
        self._checked[id(params)] = await asyncio.to_thread(validate, params, tasks)
        try:
            yield
        finally:
            del self._checked[id(params)]

    def _validate_params(
        self, params: SamplingParams | PoolingParams, supported_tasks: tuple[Any, ...]
    ) -> Any:
        if id(params) in self._checked:
            return self._checked[id(params)]
        return super()._validate_params(params, supported_tasks)


class EngineClient(AsyncLLM):  # type: ignore[misc]  # vLLM is untyped to mypy
    """
    The engine that vLLM's application calls for one model.

    `AsyncLLM` starts an engine in its constructor, which this class therefore does not call.

    Args:
        config: vLLM's configuration of the model; its device and parallelism are not used.
        core: Makes the client of the engine core for the configuration; the client may end requests
            with an error.
    """

    def __init__(self, config: VllmConfig, core: Callable[[VllmConfig, Fail], CoreClient]) -> None:
        self.vllm_config = config
        self.model_config = config.model_config
        self.scheduler_config = config.scheduler_config
        self.observability_config = config.observability_config
        self.log_requests = self.log_stats = False
        self.logger_manager = self.profiler = self.admission_stats = None
        self.renderer = renderer_from_config(config)
        self.input_processor = CheckedInputs(config, self.renderer)
        self.output_processor = OutputProcessor(
            self.renderer.tokenizer, log_stats=False, stream_interval=1
        )
        self.core = core(config, self._fail)
        self.engine_core = self.core
        self._client_count = 1
        self.output_handler: asyncio.Task[None] | None = None

    @property
    def errored(self) -> bool:
        """False: without engines, requests wait in the queue."""
        return False

    @property
    def is_running(self) -> bool:
        return True

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, **fields: Any
    ) -> RequestOutputCollector:
        """Add a request, whose grammar is checked before."""
        async with self.input_processor.checked(params, await self.get_supported_tasks()):
            return await super().add_request(request_id, prompt, params, **fields)

    async def add_lora(self, lora_request: LoRARequest) -> bool:  # noqa: ARG002 - vLLM's signature
        """Accept an adapter, which engines load for its first request."""
        return True

    async def abort(
        self,
        request_id: str | Iterable[str],
        internal: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> None:
        """End requests whose client has left, also in the mesh."""
        ids = (request_id,) if isinstance(request_id, str) else tuple(request_id)
        await self.core.cancel(self.output_processor.abort_requests(ids, internal))

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002 - vLLM's signature
        """
        Stop the processing of outputs; `AsyncLLM.shutdown` would also end the process's metrics.
        """
        if (handler := getattr(self, "output_handler", None)) is not None:
            handler.cancel()

    def _run_output_handler(self) -> None:
        """
        Start the processing of outputs. An output that cannot be processed ends its own request
        only, while in `AsyncLLM` it ends all requests.
        """
        if self.output_handler is None:
            self.output_handler = asyncio.create_task(self._process(), name="outputs of vLLM")

    async def _process(self) -> None:
        while True:
            outputs = await self.core.get_output_async()
            await self._processed(outputs)

    async def _processed(self, outputs: EngineCoreOutputs) -> None:
        for number, output in enumerate(outputs.outputs, start=1):
            if not number % _OUTPUTS_IN_A_ROW:
                await asyncio.sleep(0)
            try:
                processed = self.output_processor.process_outputs([output], outputs.timestamp)
            except Exception as error:
                log.exception("output.broken", request_id=output.request_id)
                self._fail(output.request_id, EngineGenerateError(str(error)))
                await self.core.cancel((output.request_id,))
            else:
                await self.core.abort_requests_async(processed.reqs_to_abort)

    def _fail(self, request_id: str, error: Exception) -> None:
        """End one request with *error*; its consumer raises the error."""
        state = self.output_processor.request_states.get(request_id)
        if state is None:
            return
        if state.queue is not None:
            state.queue.put(error)
        self.output_processor.abort_requests((request_id,), internal=True)
