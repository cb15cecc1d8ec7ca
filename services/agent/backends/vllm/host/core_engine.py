"""One engine core: its client, and the task that passes the core's outputs to their receivers."""

import asyncio
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import psutil
import structlog
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from services.agent.backends.vllm.host.adapters import Adapters
from services.agent.backends.vllm.host.core_requests import CoreRequests
from services.agent.backends.vllm.host.engine import Receiver
from services.agent.backends.vllm.shared.wire import EngineChoices, Submit

T = TypeVar("T")

log = structlog.get_logger()
_CHECK_PERIOD_S = 0.1


class CoreEngine:
    """
    A running engine core.

    Outputs are passed on in vLLM's encoding: the receivers read token ids, and nothing is
    detokenized.

    Args:
        client: vLLM's asynchronous `EngineCoreClient`, whose processes run.
        requests: Builds the requests of this core.
        adapters: LoRA adapters of this core.
        choices: Configuration of the engine.
    """

    def __init__(
        self, client: Any, requests: CoreRequests, adapters: Adapters, choices: EngineChoices
    ) -> None:
        self.requests: CoreRequests = requests
        self.adapters = adapters
        self.choices = choices
        self.workers: tuple[psutil.Process, ...] = ()
        """Child processes of the core, as of its start; written once, by its creator."""
        self._client = client
        self._receivers: dict[str, Receiver] = {}
        self._tasks: tuple[str, ...] | None = None
        self._reading: asyncio.Task[None] | None = None
        """
        Task that reads outputs; None until the first request, since a thread without a loop may
        create the engine.
        """

    @property
    def errored(self) -> bool:
        """True if the engine core has died, or if its outputs cannot be read."""
        is_read = self._reading is None or not self._reading.done()
        return bool(self._client.resources.engine_dead) or not is_read

    @property
    def processes(self) -> tuple[BaseProcess, ...]:
        """Processes of the engine core."""
        manager = getattr(self._client.resources, "engine_manager", None)
        return tuple(getattr(manager, "processes", ()))

    async def tasks(self) -> tuple[str, ...]:
        """
        What the model makes of its inputs, in vLLM's words.

        Raises:
            EngineDeadError: The core has died.
        """
        if self._tasks is None:
            self._tasks = tuple(await self._answered(self._client.get_supported_tasks_async()))
        return self._tasks

    async def adapter(self, command: Submit, core_id: str) -> LoRARequest | None:
        """
        The adapter of a run, which is loaded for the request *core_id*; None without an adapter.

        Raises:
            ValueError: The adapter cannot be loaded.
            EngineDeadError: The core has died.
        """
        name = command.request.adapter
        if name is None:
            return None
        return await self._answered(self.adapters.take(core_id, name, command.adapter_path))

    async def keep_adapters(self, adapters: Iterable[tuple[str, str]]) -> None:
        """
        Unload unused adapters but those with these names and directories.

        Raises:
            EngineDeadError: The core has died.
        """
        await self._answered(self.adapters.keep(adapters))

    @contextmanager
    def giving_back(self, *core_ids: str) -> Iterator[None]:
        """Context in which requests take adapters and are built; after an error they use none."""
        try:
            yield
        except BaseException:  # also when cancelled: no request will give the adapters back
            for core_id in core_ids:
                self.adapters.give_back(core_id)
            raise

    def give_back(self, core_id: str) -> None:
        """End the use of an adapter by a request that is not submitted."""
        self.adapters.give_back(core_id)

    async def submit(self, request: Any, receiver: Receiver) -> None:
        """
        Send *request*, which `requests` has built, to the core; *receiver* gets its outputs.

        Raises:
            EngineDeadError: The core has died.
        """
        self._receivers[request.request_id] = receiver
        try:
            await self._client.add_request_async(request)
        except BaseException:  # also when cancelled: the core never answers this request
            self._forget(request.request_id)
            raise
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(), name="read-engine-core")

    async def abort(self, request_id: str) -> None:
        """End a request, whose receiver then gets no further calls; ended requests are ignored."""
        if self._forget(request_id) is not None:
            with suppress(EngineDeadError):
                await self._client.abort_requests_async([request_id])

    async def sleep(self) -> None:
        """
        Release the device's memory; the weights stay in host memory.

        Raises:
            EngineDeadError: The core has died.
        """
        await self._answered(self._client.sleep_async(level=1))

    async def wake_up(self) -> None:
        """
        Use the device again after `sleep`.

        Raises:
            EngineDeadError: The core has died.
        """
        await self._answered(self._client.wake_up_async())

    async def reload_weights(self, path: str) -> None:
        """
        Replace the model's weights by those in *path*.

        Raises:
            EngineDeadError: The core has died.
        """
        weights = {"weights_path": path}
        await self._answered(self._client.collective_rpc_async("reload_weights", kwargs=weights))

    async def reset_caches(self) -> bool:
        """
        Drop all KV that no request owns, on the device and in host memory, and embeddings of
        images.

        Returns:
            False if requests own KV.

        Raises:
            EngineDeadError: The core has died.
        """
        if self.requests.reads_images:
            await self._answered(self._client.reset_encoder_cache_async())
        return await self._answered(self._client.reset_prefix_cache_async(reset_connector=True))

    def shutdown(self) -> None:
        """Kill the core's processes; receivers get no further calls."""
        self._receivers.clear()
        with suppress(EngineDeadError):
            self._client.shutdown(timeout=0)

    async def _answered(self, call: Awaitable[T]) -> T:
        """Return the core's answer to *call*; vLLM would wait for a dead core without end."""
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((answer,), timeout=_CHECK_PERIOD_S))[0]:
                if self.errored:
                    raise EngineDeadError
            return answer.result()
        finally:
            answer.cancel()

    async def _read(self) -> None:
        try:
            while True:
                for output in (await self._client.get_output_async()).outputs:
                    await self._deliver(output)
        except EngineDeadError as error:
            self._lose_requests(error)
        except Exception as error:  # vLLM cannot decode the outputs and then reads no more
            log.exception("outputs.rejected")
            self._lose_requests(EngineDeadError(str(error)))

    async def _deliver(self, output: Any) -> None:
        receiver = self._receivers.get(output.request_id)
        if receiver is None:  # the request was aborted
            return
        try:
            ended = receiver.on_output(output)
        except Exception as error:  # noqa: BLE001 - one bad output ends only its own request
            await self.abort(output.request_id)
            receiver.on_error(error)
        else:
            if output.finished:
                self._forget(output.request_id)
            elif ended:
                await self.abort(output.request_id)

    def _forget(self, request_id: str) -> Receiver | None:
        """Remove and return the receiver of a request, which uses its adapter no more."""
        self.adapters.give_back(request_id)
        return self._receivers.pop(request_id, None)

    def _lose_requests(self, error: EngineDeadError) -> None:
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.on_error(error)
