"""What runs need of an engine, whether its core is a process of the host or a server of others."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from vllm.lora.request import LoRARequest

from services.agent.backends.vllm.host.core_requests import CoreRequests
from services.agent.backends.vllm.shared.wire import Submit


class Receiver(Protocol):
    """Receives the outputs of one request."""

    def on_output(self, output: Any) -> bool:
        """
        Process an `EngineCoreOutput`; return True if the request has ended for the receiver.

        Raises:
            Exception: The output is invalid; the request is then aborted.
        """

    def on_error(self, error: Exception) -> None:
        """
        Process the failure of the request: an `EngineDeadError` if the engine has died, a
        `NotActiveError` if another instance may serve the request.
        """


class Engine(Protocol):
    """An engine of one model."""

    @property
    def requests(self) -> CoreRequests:
        """Builds and checks the requests of this engine."""

    async def tasks(self) -> tuple[str, ...]:
        """
        What the model makes of its inputs, in vLLM's words.

        Raises:
            EngineDeadError: The engine has died.
        """

    async def adapter(self, command: Submit, core_id: str) -> LoRARequest | None:
        """
        The adapter of a run, which is loaded for the request *core_id*; None without an adapter.

        Raises:
            ValueError: The adapter cannot be loaded.
            EngineDeadError: The engine has died.
        """

    def giving_back(self, *core_ids: str) -> AbstractContextManager[None]:
        """Context in which requests take adapters and are built; after an error they use none."""

    def give_back(self, core_id: str) -> None:
        """End the use of an adapter by a request that is not submitted."""

    async def submit(self, request: Any, receiver: Receiver) -> None:
        """
        Begin *request*, which `requests` has built; *receiver* gets its outputs.

        Raises:
            EngineDeadError: The engine has died.
        """

    async def abort(self, request_id: str) -> None:
        """End a request, whose receiver then gets no further calls; ended requests are ignored."""
