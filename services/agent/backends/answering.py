"""The part of a backend that answers requests: it checks the requests and streams their tokens."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable

from services.agent.backends.base import EngineIdentity, EngineOutput, EngineRequest
from services.agent.backends.checks import (
    check_call,
    check_request,
    finished_already,
    vocab_size_of,
)
from services.agent.backends.residency import ResidencyTable
from services.agent.backends.stream import OutputStream
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import EngineError, NotActiveError
from shared.contracts.models import ModelEntry


class AnsweringBackend(ABC):
    """
    Streams of the current runs, as `EngineBackend` describes them.

    Args:
        entries: Models that can be activated.
        residency: The active model.
    """

    def __init__(self, entries: Iterable[ModelEntry], residency: ResidencyTable) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._vocab_sizes = {name: vocab_size_of(entry) for name, entry in self._entries.items()}
        self._residency = residency
        self._streams: dict[RequestId, OutputStream] = {}

    def add(self, entry: ModelEntry) -> None:
        self._entries[entry.name] = entry
        self._vocab_sizes[entry.name] = vocab_size_of(entry)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        if request.model != self._residency.active or self._residency.is_activating:
            self._require_alive()
            raise NotActiveError(f"model {request.model!r} is not active")
        entry = self._entries[request.model]
        if request.call is not None:
            check_call(request, self.identity.capabilities)
        elif reason := finished_already(entry, request):
            yield EngineOutput(token_ids=(), finish_reason=reason)
            return
        else:
            check_request(entry, request, self._vocab_sizes[request.model])
        if request.request_id in self._streams:
            raise EngineError(f"request {request.request_id} is running already")
        self._submit(request)
        stream = self._streams[request.request_id] = OutputStream()
        try:
            async for output in stream.outputs():
                self._answered(request)
                yield output
        finally:
            self._answered(request)
            self._leave(request.request_id, stream)

    async def abort(self, request_id: RequestId) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._leave(request_id, stream)

    @property
    @abstractmethod
    def identity(self) -> EngineIdentity: ...

    @abstractmethod
    def _require_alive(self) -> object:
        """
        Check that the engine is running.

        Raises:
            EngineError: The engine is not running.
        """

    @abstractmethod
    def _submit(self, request: EngineRequest) -> None:
        """Send a checked request to the engine of the request's model, which is active."""

    @abstractmethod
    def _cancel(self, request_id: RequestId) -> None:
        """End a run inside the engine."""

    def _answered(self, request: EngineRequest) -> None:  # noqa: B027 - need not do anything
        """Called when the request *request* has new tokens, and when its token stream ends."""

    def _leave(self, request_id: RequestId, stream: OutputStream) -> None:
        """Remove a run; abort it in the engine if it has not ended."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            if not stream.ended:
                self._cancel(request_id)
            stream.end()

    def _fail_streams(self, message: str) -> None:
        """Fail all runs because the engine died."""
        for stream in self._streams.values():
            stream.fail(EngineError(message, engine_dead=True))
        self._streams.clear()

    def _require_known(self, model: ModelName) -> ModelEntry:
        entry = self._entries.get(model)
        if entry is None:
            raise EngineError(f"the engine has no model {model!r}")
        return entry
