"""Status and telemetry of the agent, published without confirmation, and counted as metrics."""

import asyncio
import math
from collections.abc import Callable

import msgspec

from services.agent.backends.base import EngineBackend
from services.agent.metrics import AgentMetrics
from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.broker.work_queues import WorkQueues
from shared.contracts.base import Message, Seconds
from shared.contracts.routing import Prefill, PrefillsObserved
from shared.contracts.telemetry import (
    InstanceStatus,
    IterationsObserved,
    LanesPulled,
    LsoExecuted,
    ModelActivated,
    RegistryState,
    RequestObserved,
    source_name,
)
from shared.runtime.clock import Clock
from solver.instance.instance import Instance
from solver.instance.views import status
from solver.planning.lso.operations import (
    Activate,
    Checkpoint,
    Cool,
    Evict,
    Lso,
    SwapIn,
    SwapOut,
    Warm,
)
from solver.planning.lso.results import LsoResult

MAX_ITERATIONS = 200
PULLS_PERIOD_S = 0.2
"""Time for which pulls are collected; the leader plans every 0.5 s."""


class Reporter:
    """
    Publishes views of the instance, and what its engine reports.

    Args:
        instance: The instance; it is only read.
        queues: The work queues of this process.
        metrics: Counts finished requests and operations.
        registry: Returns the state of the registry that this process follows.
    """

    def __init__(
        self,
        *,
        instance: Instance,
        engine: EngineBackend,
        broker: Broker,
        queues: WorkQueues,
        metrics: AgentMetrics,
        clock: Clock,
        registry: Callable[[], RegistryState | None] = lambda: None,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._instance = instance
        self._engine = engine
        self._broker = broker
        self._queues = queues
        self._clock = clock
        self._seq = 0
        self._pulled: dict[str, int] = {}
        """Queue -> number of pulls that were reported."""
        self._is_reporting_pulls = False
        self.pace_s: Seconds = math.inf
        """Mean duration of the iterations that the engine reported last."""

    def status(self) -> InstanceStatus:
        """Present status of the instance."""
        self._seq += 1
        present = status(
            self._instance,
            self._clock.now(),
            seq=self._seq,
            kv_utilization=self._engine.snapshot().kv_utilization,
            put=self._queues.put,
            released=self._queues.released,
        )
        return msgspec.structs.replace(present, registry=self._registry())

    async def report(self) -> None:
        """Publish the status, and the engine's iterations if the backend has reported any."""
        instance, settings = self._instance, self._instance.settings
        await self._send(topology.status_key(settings.instance_id), self.status())
        iterations = self._engine.drain_iterations()
        if not iterations:
            return
        self.pace_s = sum(each.duration_s for each in iterations) / len(iterations)
        if instance.model is not None:
            sampled = iterations[:: -(-len(iterations) // MAX_ITERATIONS)]
            observed = IterationsObserved(
                instance_id=settings.instance_id,
                model=instance.model,
                engine=settings.engine,
                device=settings.device,
                at=self._clock.now(),
                iterations=tuple(each.timed() for each in sampled),
                prefill_pairs=tuple(int(each.prefill_pairs) for each in sampled),
            )
            await self._send(topology.OBSERVED_ENGINE_KEY, observed)

    async def report_pulls(self) -> None:
        """
        Publish recent pulls, so that the leader plans no work that this agent already holds.

        Waits for further pulls before; calls in the meantime return at once.
        """
        if self._is_reporting_pulls:
            return
        self._is_reporting_pulls = True
        await asyncio.sleep(PULLS_PERIOD_S)
        self._is_reporting_pulls = False
        totals = self._instance.totals.by_lane
        recent = {queue: num for queue, num in totals.items() if num != self._pulled.get(queue)}
        if recent:
            self._pulled.update(recent)
            settings = self._instance.settings
            source = source_name(settings.instance_id, settings.incarnation)
            message = LanesPulled(source=source, pulled=recent)
            await self._send(topology.LANES_PULLED_KEY, message)

    async def prefilled(self, prefill: Prefill) -> None:
        """Publish to routers that a request has its first token."""
        instance, settings = self._instance, self._instance.settings
        if instance.model is not None:
            observed = PrefillsObserved(
                instance_id=settings.instance_id,
                incarnation=settings.incarnation,
                model=instance.model,
                at=self._clock.now(),
                prefills=(prefill,),
            )
            await self._send(topology.PREFILLS_KEY, observed)

    async def observed(self, observation: RequestObserved) -> None:
        """Count a finished request, and publish its observation."""
        self._metrics.finished(observation)
        await self._send(topology.OBSERVED_REQUEST_KEY, observation)

    async def activated(self, event: ModelActivated) -> None:
        """Publish a finished activation and the new status."""
        await self._send(topology.OBSERVED_ENGINE_KEY, event)
        await self._send(topology.status_key(event.instance_id), self.status())

    async def executed(self, lso: Lso, result: LsoResult) -> None:
        """
        Count an operation that has ended, and publish it; the broker drops it unless a display is
        open.
        """
        self._metrics.ended(lso.kind, result)
        executed = LsoExecuted(
            instance_id=self._instance.settings.instance_id,
            at=self._clock.now(),
            lso=lso.kind,
            outcome=result.outcome.value,
            subject=_subject(lso),
            reason=lso.reason.text,
            message=result.message,
            duration_s=result.duration_s,
        )
        await self._send(topology.LSO_KEY, executed)

    async def _send(self, key: str, message: Message) -> None:
        await send_best_effort(self._broker, topology.TELEMETRY, key, OutMessage.transient(message))


def _subject(lso: Lso) -> str:
    """What an operation concerns, in a few words."""
    match lso:
        case Evict(request_ids=(request_id,)) | SwapOut(request_id=request_id):
            return request_id
        case SwapIn(request_id=request_id) | Checkpoint(request_id=request_id):
            return request_id
        case Evict(request_ids=request_ids):
            return f"{len(request_ids)} requests"
        case Warm(model=model) | Cool(model=model) | Activate(model=model):
            return model
        case _:
            return ""
