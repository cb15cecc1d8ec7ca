"""One model in a grouper that routes: its router, and the requests that wait for their turn."""

import asyncio
from dataclasses import dataclass, field

from services.planner.model_router import ModelRouter
from shared.contracts.base import InstanceId, RequestId, UnixTime
from shared.contracts.errors import TransientError
from shared.contracts.requests import QueuedRequest
from solver.routing.device_prefills import DeviceKey


@dataclass(slots=True)
class Held:
    """A request that waits for its turn; its delivery is not acknowledged meanwhile."""

    request: QueuedRequest
    since: UnixTime
    placed: asyncio.Future[InstanceId | None]
    """Where it goes; none is its lane."""

    def place(self, instance_id: InstanceId | None) -> None:
        """It waits no longer."""
        if not self.placed.done():
            self.placed.set_result(instance_id)


@dataclass(slots=True)
class RoutedModel:
    """What a grouper has of one model. No IO."""

    router: ModelRouter
    held: dict[RequestId, Held] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    """Number of the last residual that others were told, by version."""
    trees: dict[DeviceKey, int] = field(default_factory=dict)
    """Versions in use."""
    heard: dict[str, UnixTime] = field(default_factory=dict)
    """Other groupers that route the model, and when they last said so."""

    def dispatch(self, now: UnixTime) -> None:
        """Let those go whose turn it is."""
        for assignment in self.router.router.dispatch(now):
            held = self.held.pop(assignment.request.request_id, None)
            if held is not None:
                held.place(assignment.instance_id)

    def lose(self, instance_id: InstanceId, now: UnixTime) -> None:
        """What waited for an instance that serves the model no longer waits for another."""
        for key in self.router.lose(instance_id, now):
            held = self.held.get(key)
            if held is None:
                continue
            if self.router.router.instances:
                self.router.submit(key, held.request, now)
            else:
                self.held.pop(key).place(None)
        self.dispatch(now)

    def withdraw(self, key: RequestId, now: UnixTime) -> None:
        """Whoever waited with a request does so no longer; of one that was sent, nothing."""
        if self.held.pop(key, None) is not None:
            self.router.router.discard(key, now)

    def give_up(self, before: UnixTime, now: UnixTime) -> None:
        """What has waited since *before* goes to lanes, whatever keeps its instance."""
        for key in [key for key, held in self.held.items() if held.since < before]:
            self.held[key].place(None)
            self.withdraw(key, now)

    def void(self, now: UnixTime) -> None:
        """What waits is delivered again, maybe to others; first tokens go unheard meanwhile."""
        for held in self.held.values():
            if not held.placed.done():
                held.placed.set_exception(TransientError("its delivery is void"))
        self.held.clear()
        self.router.begin_anew(now)

    def close(self) -> None:
        """What waits goes to lanes."""
        for held in self.held.values():
            held.place(None)
        self.held.clear()
