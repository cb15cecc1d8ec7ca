"""The part of a backend that answers requests: it checks the requests and reports their tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from services.agent.backends.base import (
    EngineEvent,
    EngineIdentity,
    EngineLost,
    EngineOutput,
    EngineRequest,
    Listener,
    NewOutput,
    RunEnded,
)
from services.agent.backends.checks import (
    check_call,
    check_request,
    finished_already,
    vocab_size_of,
)
from services.agent.backends.residency import ResidencyTable
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import EngineError, NotActiveError
from shared.contracts.models import ModelEntry


class AnsweringBackend(ABC):
    """
    The current runs and their events, as `EngineBackend` describes them.

    Args:
        entries: Models that can be activated.
        residency: The active model.
    """

    def __init__(self, entries: Iterable[ModelEntry], residency: ResidencyTable) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._vocab_sizes = {name: vocab_size_of(entry) for name, entry in self._entries.items()}
        self._adapters = {name: dict(entry.adapters) for name, entry in self._entries.items()}
        """
        Model -> directory of each adapter by name, also of removed ones: requests for them may
        still be queued.
        """
        self._residency = residency
        self._runs: dict[RequestId, EngineRequest] = {}
        self._listener: Listener = _ignore

    def add(self, entry: ModelEntry) -> None:
        self._entries[entry.name] = entry
        self._adapters[entry.name] = dict(entry.adapters)
        self._vocab_sizes[entry.name] = vocab_size_of(entry)

    def replace(self, entry: ModelEntry) -> None:
        self._entries[entry.name] = entry
        self._adapters[entry.name] |= entry.adapters

    def _forget(self, model: ModelName) -> None:
        """
        Remove a model that is not needed any more.

        Raises:
            EngineError: Requests of the model are running.
        """
        if any(request.model == model for request in self._runs.values()):
            raise EngineError(f"requests of {model} are running")
        del self._entries[model], self._vocab_sizes[model], self._adapters[model]

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    def submit(self, request: EngineRequest) -> None:
        if request.model != self._residency.active or self._residency.is_activating:
            self._require_alive()
            raise NotActiveError(f"model {request.model!r} is not active")
        entry = self._entries[request.model]
        if request.adapter is not None and request.adapter not in self._adapters[request.model]:
            raise EngineError(f"{request.model} has no adapter {request.adapter!r}")
        if request.call is not None:
            check_call(self.identity.capabilities)
        elif reason := finished_already(entry, request):
            done = EngineOutput(token_ids=(), finish_reason=reason)
            self._listener((NewOutput(request.request_id, done),))
            return
        else:
            check_request(entry, request, self._vocab_sizes[request.model])
        if request.request_id in self._runs:
            raise EngineError(f"request {request.request_id} is running already")
        self._submit(request)
        self._runs[request.request_id] = request

    def abort(self, request_id: RequestId) -> None:
        request = self._runs.pop(request_id, None)
        if request is not None:
            self._answered(request)
            self._cancel(request_id)
            self._listener((RunEnded(request_id),))

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
        """Called when a run has new output, and when it has ended."""

    def _report(self, events: Sequence[NewOutput | RunEnded]) -> None:
        """Send the events of one turn to the listener, without those of runs that have ended."""
        known: list[EngineEvent] = []
        for event in events:
            request = self._runs.get(event.request_id)
            if request is None:
                continue
            known.append(event)
            if isinstance(event, RunEnded) or event.output.is_last:
                del self._runs[event.request_id]
            self._answered(request)
        if known:
            self._listener(known)

    def _lose(self, message: str) -> None:
        """End all runs because the engine died."""
        error = EngineError(message, engine_dead=True)
        ended = [RunEnded(request_id, error) for request_id in self._runs]
        self._runs.clear()
        self._listener((EngineLost(message), *ended))

    def _require_known(self, model: ModelName) -> ModelEntry:
        entry = self._entries.get(model)
        if entry is None:
            raise EngineError(f"the engine has no model {model!r}")
        return entry


def _ignore(_events: Sequence[EngineEvent]) -> None:
    """The listener before the first call of `listen`."""
