"""The part of a backend whose engine takes tokens: bodies of requests become runs in tokens."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from services.agent.backends.answering import AnsweringBackend
from services.agent.backends.base import EngineRequest, NewOutput, RunEnded
from services.agent.backends.bodies.bodies import Bodies
from services.agent.backends.residency import ResidencyTable
from shared.contracts.base import RequestId
from shared.contracts.models import ModelEntry


class TokenEngine(AnsweringBackend):
    """
    The current runs of an engine that takes tokens and generates tokens.

    A small application reads the bodies of `/v1/chat/completions`, `/v1/completions`,
    `/v1/responses` and `/v1/messages`, runs each of their answers at the engine, and makes the
    events and the response. The backend reports the capability `CALLS`.
    """

    def __init__(self, entries: Iterable[ModelEntry], residency: ResidencyTable) -> None:
        super().__init__(entries, residency)
        self._bodies = Bodies(submit=self._run, cancel=self._stop, report=super()._report)

    @abstractmethod
    def _run(self, request: EngineRequest) -> None:
        """Begin to generate the tokens of a checked request, or of one answer to a body."""

    @abstractmethod
    def _stop(self, request_id: RequestId) -> None:
        """End what `_run` has begun and what has not ended."""

    def _submit(self, request: EngineRequest) -> None:
        if request.call is None:
            self._run(request)
            return
        self._require_alive()
        entry, vocab_size = self._entries[request.model], self._vocab_sizes[request.model]
        self._bodies.begin(request, request.call, entry, vocab_size)

    def _cancel(self, request_id: RequestId) -> None:
        if not self._bodies.cancel(request_id):
            self._stop(request_id)

    def _report(self, events: Sequence[NewOutput | RunEnded]) -> None:
        """Report tokens, and ends without a finish reason, of what `_run` has begun."""
        super()._report([each for event in events for each in self._bodies.events_of(event)])

    def _lose(self, message: str) -> None:
        self._bodies.clear()
        super()._lose(message)
