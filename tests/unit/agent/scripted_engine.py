"""An engine that generates what the test says, when it says so."""

import asyncio
from collections.abc import AsyncIterator

from services.agent.backends.base import (
    Capability,
    EngineIdentity,
    EngineOutput,
    EngineRequest,
    EngineSnapshot,
    SchedulingParameters,
)
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.errors import EngineError
from shared.contracts.requests import FinishReason
from shared.contracts.telemetry import Iteration, ModelState, Residency
from tests.brokers import eventually
from tests.queued import MODEL, OTHER

Item = EngineOutput | Exception | None


class ScriptedEngine:
    """
    An `EngineBackend` without a will of its own.

    Args:
        max_running: As its snapshot says.
        kv_capacity_tokens: Likewise.
    """

    def __init__(self, *, max_running: int = 8, kv_capacity_tokens: int = 10_000) -> None:
        self.model: ModelName | None = MODEL
        self.alive = True
        self.max_running = max_running
        self.kv_capacity_tokens = kv_capacity_tokens
        self.requests: dict[RequestId, EngineRequest] = {}
        """Everything that was ever generated, by id; the last one counts."""
        self.activations: list[ModelName] = []
        self.starts = 0
        self.fail_start: list[EngineError] = []
        """Raised by the next calls of `start`, first first."""
        self.fail_activate: list[EngineError] = []
        self._streams: dict[RequestId, asyncio.Queue[Item]] = {}

    @property
    def running(self) -> set[str]:
        return set(self._streams)

    async def began(self, request_id: str) -> EngineRequest:
        """Wait for a request to reach the engine."""
        await eventually(lambda: request_id in self._streams)
        return self.requests[RequestId(request_id)]

    def emit(
        self,
        request_id: str,
        *tokens: int,
        finish: FinishReason | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """Generate *tokens* in one go."""
        output = EngineOutput(token_ids=tokens, finish_reason=finish, cached_tokens=cached_tokens)
        self._streams[RequestId(request_id)].put_nowait(output)

    def refuse(self, request_id: str) -> None:
        self._streams[RequestId(request_id)].put_nowait(EngineError("the engine says no"))

    def fail(self, request_id: str, error: Exception) -> None:
        """Break down over one request, in a way that no engine should."""
        self._streams[RequestId(request_id)].put_nowait(error)

    def die(self) -> None:
        self.alive, self.model = False, None
        for stream in self._streams.values():
            stream.put_nowait(EngineError("the engine died", engine_dead=True))

    @property
    def identity(self) -> EngineIdentity:
        return EngineIdentity(
            engine="scripted", device="paper", capabilities=frozenset({Capability.MODEL_SWAP})
        )

    async def prepare(self) -> None: ...

    async def start(self) -> None:
        self.starts += 1
        if self.fail_start:
            raise self.fail_start.pop(0)
        self.alive = True

    async def activate(self, model: ModelName) -> Seconds:
        if self._streams:
            raise EngineError("requests are running")
        if self.fail_activate:
            self.model = None
            raise self.fail_activate.pop(0)
        self.model = model
        self.activations.append(model)
        return 0.5

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        if not self.alive:
            raise EngineError("the engine is dead", engine_dead=True)
        if request.model != self.model:
            raise EngineError(f"{request.model} is not active")
        stream = self._streams[request.request_id] = asyncio.Queue[Item]()
        self.requests[request.request_id] = request
        try:
            while (item := await stream.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._streams.pop(request.request_id, None)

    async def abort(self, request_id: RequestId) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.put_nowait(None)

    async def set_scheduling(self, parameters: SchedulingParameters) -> None: ...

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            model=self.model,
            running=len(self._streams),
            waiting=0,
            kv_utilization=0.0,
            kv_capacity_tokens=self.kv_capacity_tokens,
            max_running=self.max_running,
            models=tuple(
                ModelState(
                    model=model,
                    residency=Residency.ACTIVE if model == self.model else Residency.COLD,
                )
                for model in (MODEL, OTHER)
            ),
        )

    def drain_iterations(self) -> tuple[Iteration, ...]:
        return ()

    async def close(self) -> None: ...
