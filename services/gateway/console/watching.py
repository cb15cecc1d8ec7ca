"""What the console shows of the mesh, collected from messages while a browser is open."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import structlog

from services.gateway.console.attainment import Attainment
from shared.broker import topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker
from shared.broker.rpc import ask
from shared.contracts.base import Decoder, InstanceId, Seconds, UnixTime
from shared.contracts.errors import MeshError
from shared.contracts.plans import PlanExplained, PlanRequested
from shared.contracts.telemetry import (
    InstanceStatus,
    IterationsObserved,
    LsoExecuted,
    RequestObserved,
)
from shared.runtime.clock import Clock
from shared.runtime.tasks import pause

log = structlog.get_logger()

LOOK_PERIOD_S: Seconds = 0.25
PLAN_PERIOD_S: Seconds = 2.0
PLAN_TIMEOUT_S: Seconds = 5.0
LINGER_S: Seconds = 60.0
"""Time for which messages are received after the last browser has gone."""
MOST_LSOS = 200
FORGET_S: Seconds = 600.0
"""Time after which an instance without a status is no longer shown."""
_KEYS = (
    topology.STATUS_KEYS,
    topology.OBSERVED_REQUEST_KEY,
    topology.OBSERVED_ENGINE_KEY,
    topology.LSO_KEY,
)
_Heard = InstanceStatus | IterationsObserved | LsoExecuted | RequestObserved
_decode: Decoder[_Heard] = Decoder(_Heard)
_decode_plan: Decoder[PlanExplained] = Decoder(PlanExplained)


@dataclass(slots=True)
class MeshWatch:
    """
    State of the mesh for the console. Without a browser, nothing is received and nothing is kept.

    Args:
        broker: The broker.
        clock: Wall time.
    """

    broker: Broker
    clock: Clock
    since: UnixTime | None = None
    """Time from which messages are received; None while they are not."""
    statuses: dict[InstanceId, tuple[UnixTime, InstanceStatus]] = field(default_factory=dict)
    """Instance -> time and content of its last status."""
    pace_s: dict[InstanceId, Seconds] = field(default_factory=dict)
    """Instance -> mean duration of the iterations that it reported last."""
    lsos: deque[LsoExecuted] = field(default_factory=lambda: deque(maxlen=MOST_LSOS))
    """The last operations of all instances, the newest last."""
    attainment: Attainment = field(default_factory=Attainment)
    plan: PlanExplained | None = None
    plan_at: UnixTime = 0.0
    """Time at which the leader answered last."""
    _num_viewers: int = 0
    _left_at: UnixTime = 0.0

    @contextlib.contextmanager
    def viewed(self) -> Iterator[None]:
        """Context in which a browser shows the state."""
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1
            self._left_at = self.clock.now()

    @property
    def num_viewers(self) -> int:
        return self._num_viewers

    async def follow(self, stop: asyncio.Event) -> None:
        """Receive messages while a browser is open, until *stop*."""
        while not await pause(stop, LOOK_PERIOD_S):
            if not self._num_viewers:
                continue
            try:
                await self._receive(stop)
            except MeshError as error:
                log.warning("console.blind", error=str(error))
                await pause(stop, PLAN_PERIOD_S)

    async def _receive(self, stop: asyncio.Event) -> None:
        queue = topology.temporary_queue("console")
        bindings = [(topology.TELEMETRY, key) for key in _KEYS]
        self._forget()
        self.since = self.clock.now()
        try:
            async with listening(self.broker, queue, _decode, bindings, self.on_message):
                while self._is_wanted():
                    await self._ask_leader()
                    if await pause(stop, PLAN_PERIOD_S):
                        return
        finally:
            self.since = None

    def on_message(
        self, message: InstanceStatus | IterationsObserved | LsoExecuted | RequestObserved
    ) -> None:
        """Add a message to the state."""
        match message:
            case InstanceStatus():
                self.statuses[message.instance_id] = (self.clock.now(), message)
            case IterationsObserved(iterations=iterations) if iterations:
                total_s = sum(each.duration_s for each in iterations)
                self.pace_s[message.instance_id] = total_s / len(iterations)
            case LsoExecuted():
                self.lsos.append(message)
            case RequestObserved():
                self.attainment.add(message)

    def present(self) -> dict[InstanceId, tuple[UnixTime, InstanceStatus]]:
        """The instances whose last status is not too old."""
        since = self.clock.now() - FORGET_S
        return {name: seen for name, seen in self.statuses.items() if seen[0] >= since}

    async def _ask_leader(self) -> None:
        plan = await ask(
            self.broker,
            topology.CONTROL_PLAN,
            lambda reply_to: PlanRequested(reply_to=reply_to),
            _decode_plan,
            timeout_s=PLAN_TIMEOUT_S,
        )
        if isinstance(plan, PlanExplained):
            self.plan, self.plan_at = plan, self.clock.now()

    def _is_wanted(self) -> bool:
        return self._num_viewers > 0 or self.clock.now() < self._left_at + LINGER_S

    def _forget(self) -> None:
        """Forget what was received earlier: the time in between is missing."""
        self.statuses.clear()
        self.pace_s.clear()
        self.lsos.clear()
        self.attainment.clear()
        self.plan = None
