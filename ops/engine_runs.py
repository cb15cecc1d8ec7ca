"""Iterators over the outputs of single runs, for programs that use an engine without an agent."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from weakref import WeakKeyDictionary

from services.agent.backends.base import (
    EngineBackend,
    EngineEvent,
    EngineLost,
    EngineOutput,
    EngineRequest,
    NewOutput,
)
from shared.contracts.base import RequestId


class EngineRuns:
    """
    Iterators over the outputs of one engine's runs.

    Args:
        engine: The engine; it has no other listener while runs are iterated over.
    """

    def __init__(self, engine: EngineBackend) -> None:
        self._engine = engine
        self._runs: dict[RequestId, asyncio.Queue[EngineEvent]] = {}

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """
        Run *request* and iterate over its outputs; ending the iteration early aborts the run.

        Raises:
            MeshError: The run failed.
        """
        events = asyncio.Queue[EngineEvent]()
        if request.request_id not in self._runs:
            self._runs[request.request_id] = events
        self._engine.listen(self._on_events)
        try:
            self._engine.submit(request)
            while isinstance(event := await events.get(), NewOutput):
                yield event.output
                if event.output.is_last:
                    return
            if not isinstance(event, EngineLost) and event.error is not None:
                raise event.error
        finally:
            if self._runs.get(request.request_id) is events:
                del self._runs[request.request_id]
                self._engine.abort(request.request_id)

    def _on_events(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if not isinstance(event, EngineLost) and event.request_id in self._runs:
                self._runs[event.request_id].put_nowait(event)


_KNOWN: WeakKeyDictionary[EngineBackend, EngineRuns] = WeakKeyDictionary()


def generate(engine: EngineBackend, request: EngineRequest) -> AsyncIterator[EngineOutput]:
    """`EngineRuns.generate` of the one listener of *engine*."""
    if engine not in _KNOWN:
        _KNOWN[engine] = EngineRuns(engine)
    return _KNOWN[engine].generate(request)
