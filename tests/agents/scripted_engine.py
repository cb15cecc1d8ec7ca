"""An engine that generates tokens only when a test calls it, with the test's values."""

from dataclasses import replace

import msgspec

from services.agent.backends.base import (
    EngineIdentity,
    EngineLost,
    EngineOutput,
    EngineRequest,
    EngineSnapshot,
    Listener,
    NewOutput,
    RunEnded,
    SchedulingParameters,
)
from shared.contracts.base import ModelName, RequestId, Seconds
from shared.contracts.errors import EngineError, MeshError, NotActiveError, UnsupportedError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import FinishReason, StepDetails
from shared.contracts.telemetry import Capability, EngineIteration, ModelState, Residency
from tests.brokers import eventually
from tests.queued import MODEL, OTHER


def plain(engine_id: str) -> RequestId:
    """The id of a run's request: the run's id without its suffix."""
    return RequestId(engine_id.partition("/")[0])


class ScriptedEngine:
    """
    An `EngineBackend` that a test controls. Tests use ids of requests, not of runs.

    Args:
        max_running: `max_running` of its snapshots.
        kv_capacity_tokens: `kv_capacity_tokens` of its snapshots.
    """

    def __init__(self, *, max_running: int = 8, kv_capacity_tokens: int = 10_000) -> None:
        self.model: ModelName | None = None
        self.alive = True
        self.max_running = max_running
        self.kv_capacity_tokens = kv_capacity_tokens
        self.requests: dict[RequestId, EngineRequest] = {}
        """The latest run of each request that the engine has received, by request id."""
        self.activations: list[ModelName] = []
        self.starts = 0
        self.fail_start: list[EngineError] = []
        """Errors of the next calls of `start`, in order."""
        self.fail_activate: list[EngineError] = []
        self.fail_submit: list[Exception] = []
        self.iterations: tuple[EngineIteration, ...] = ()
        """Iterations that the next drain returns."""
        self.slow_aborts = False
        """True: an aborted run ends when the test calls `end_aborted`."""
        self._running: dict[RequestId, EngineRequest] = {}
        self._aborted: list[RequestId] = []
        self._listener: Listener = lambda _events: None

    def add(self, entry: ModelEntry) -> None:
        """No-op: the engine does not check models."""

    def replace(self, entry: ModelEntry) -> None:
        """No-op, as above."""

    async def remove(self, model: ModelName) -> None:
        """Forget the active model; other models are not stored."""
        if model == self.model:
            self.model = None

    @property
    def running(self) -> set[str]:
        return set(self._running)

    async def began(self, request_id: str) -> EngineRequest:
        """Wait for a request to reach the engine."""
        await eventually(lambda: request_id in self._running)
        return self.requests[RequestId(request_id)]

    def emit(
        self,
        request_id: str,
        *tokens: int,
        finish: FinishReason | None = None,
        cached_tokens: int = 0,
        details: tuple[StepDetails, ...] = (),
    ) -> None:
        """Generate *tokens* in one output."""
        self.output(
            request_id,
            EngineOutput(
                token_ids=tokens,
                finish_reason=finish,
                cached_tokens=cached_tokens,
                details=details,
            ),
        )

    def output(self, request_id: str, output: EngineOutput) -> None:
        """Return an output of the engine to the agent."""
        request = self._running[RequestId(request_id)]
        if output.is_last:
            del self._running[RequestId(request_id)]
        self._listener((NewOutput(request.request_id, output),))

    def late(self, request: EngineRequest, *tokens: int) -> None:
        """Return an output of a run that has ended."""
        self._listener((NewOutput(request.request_id, EngineOutput(token_ids=tokens)),))

    def refuse(self, request_id: str) -> None:
        self.end(request_id, EngineError("the engine says no"))

    def end(self, request_id: str, error: MeshError | None = None) -> None:
        """End a run without a last output."""
        request = self._running.pop(RequestId(request_id))
        self._listener((RunEnded(request.request_id, error),))

    def end_aborted(self) -> None:
        """End the runs whose ends were delayed."""
        aborted, self._aborted = self._aborted, []
        for name in aborted:
            if name in self._running:
                self.end(name)

    def die(self) -> None:
        self.alive, self.model = False, None
        error = EngineError("the engine died", engine_dead=True)
        ended = [RunEnded(request.request_id, error) for request in self._running.values()]
        self._running.clear()
        self._listener((EngineLost("the engine died"), *ended))

    def listen(self, listener: Listener) -> None:
        self._listener = listener

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
        if self._running:
            raise EngineError("requests are running")
        if self.fail_activate:
            self.model = None
            raise self.fail_activate.pop(0)
        self.model = model
        self.activations.append(model)
        return 0.5

    def submit(self, request: EngineRequest) -> None:
        if self.fail_submit:
            raise self.fail_submit.pop(0)
        if not self.alive:
            raise EngineError("the engine is dead", engine_dead=True)
        if request.model != self.model:
            raise NotActiveError(f"{request.model} is not active")
        name = plain(request.request_id)
        self._running[name] = self.requests[name] = request

    def abort(self, request_id: RequestId) -> None:
        name = plain(request_id)
        if name not in self._running or self._running[name].request_id != request_id:
            return
        if self.slow_aborts:
            self._aborted.append(name)
        else:
            self.end(name)

    async def set_scheduling(self, parameters: SchedulingParameters) -> None: ...

    async def warm(self, model: ModelName) -> Seconds:
        raise UnsupportedError("paper has no host memory")

    async def cool(self, model: ModelName) -> None:
        raise UnsupportedError("paper has no host memory")

    async def clear_caches(self) -> None: ...

    async def preempt_now(self) -> bool:
        raise UnsupportedError("paper has no layers")

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            model=self.model,
            running=len(self._running),
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

    def drain_iterations(self) -> tuple[EngineIteration, ...]:
        drained, self.iterations = self.iterations, ()
        return drained

    async def close(self) -> None: ...


class OrderingEngine(ScriptedEngine):
    """A scripted engine that orders its requests, so that it may get more than it runs."""

    @property
    def identity(self) -> EngineIdentity:
        known = super().identity
        return replace(known, capabilities=known.capabilities | {Capability.SCHEDULING})


class AbleEngine(ScriptedEngine):
    """A scripted engine with all capabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.warmed: list[ModelName] = []
        self.limits: list[SchedulingParameters] = []
        self.preemptible = True
        """True while a forward pass with best-effort work runs."""
        self.num_cleared = 0
        self.host_kv_capacity_bytes = 1 << 30
        self.fail_warm: list[Exception] = []

    @property
    def identity(self) -> EngineIdentity:
        return replace(super().identity, capabilities=frozenset(Capability))

    async def warm(self, model: ModelName) -> Seconds:
        if self.fail_warm:
            raise self.fail_warm.pop(0)
        self.warmed.append(model)
        return 0.25

    async def cool(self, model: ModelName) -> None:
        self.warmed.remove(model)

    async def preempt_now(self) -> bool:
        return self.preemptible

    async def clear_caches(self) -> None:
        self.num_cleared += 1

    async def set_scheduling(self, parameters: SchedulingParameters) -> None:
        self.limits.append(parameters)
        self.max_running = min(self.max_running, parameters.max_running)

    def _residency_of(self, entry: ModelState) -> Residency:
        warm = entry.model in self.warmed and entry.residency is Residency.COLD
        return Residency.WARM if warm else entry.residency

    def snapshot(self) -> EngineSnapshot:
        snapshot = super().snapshot()
        return replace(
            snapshot,
            host_kv_capacity_bytes=self.host_kv_capacity_bytes,
            host_kv_bytes=4096,
            warm_capacity_bytes=2500,
            models=tuple(
                msgspec.structs.replace(entry, residency=self._residency_of(entry), warm_bytes=2000)
                for entry in snapshot.models
            ),
        )
