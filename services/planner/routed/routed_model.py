"""State of one model in a routing grouper: its router, and the requests waiting for their turn."""

import asyncio
from dataclasses import dataclass, field

from services.planner.routed.model_router import ModelRouter
from shared.contracts.base import InstanceId, RequestId, UnixTime
from shared.contracts.errors import TransientError
from shared.contracts.requests import QueuedRequest
from solver.routing.device_prefills import DeviceKey


@dataclass(slots=True)
class Held:
    """A request waiting for its turn; its delivery is not acknowledged meanwhile."""

    request: QueuedRequest
    since: UnixTime
    placed: asyncio.Future[InstanceId | None]
    """Instance to which the request is sent; None: the request goes to its lane instead."""

    def place(self, instance_id: InstanceId | None) -> None:
        """End the wait."""
        if not self.placed.done():
            self.placed.set_result(instance_id)


@dataclass(slots=True)
class RoutedModel:
    """A grouper's state of one model. No IO."""

    router: ModelRouter
    held: dict[RequestId, Held] = field(default_factory=dict)
    last_residual: dict[str, int] = field(default_factory=dict)
    """Version of the calibrated model -> number of the last published residual."""
    trees: dict[DeviceKey, int] = field(default_factory=dict)
    """Engine and device -> version of the quantile trees in use."""
    heard: dict[str, UnixTime] = field(default_factory=dict)
    """Other groupers that route the model, with the time of their last message."""

    def dispatch(self, now: UnixTime) -> None:
        """Release the requests whose turn it is."""
        for assignment in self.router.router.dispatch(now):
            held = self.held.pop(assignment.request.request_id, None)
            if held is not None:
                held.place(assignment.instance_id)

    def lose(self, instance_id: InstanceId, now: UnixTime) -> None:
        """
        Remove an instance and reassign the requests that wait for it.

        They are sent to their lanes if no other instance serves the model.
        """
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
        """Cancel a waiting request; no-op once it was sent."""
        if self.held.pop(key, None) is not None:
            self.router.router.discard(key, now)

    def give_up(self, before: UnixTime, now: UnixTime) -> None:
        """Send requests that began to wait earlier than *before* to lanes, whatever delays them."""
        for key in [key for key, held in self.held.items() if held.since < before]:
            self.held[key].place(None)
            self.withdraw(key, now)

    def void(self, now: UnixTime) -> None:
        """
        Drop waiting requests, which are redelivered, maybe to other groupers.

        Sent requests are dropped too: messages about their first tokens may have been missed.
        """
        for held in self.held.values():
            if not held.placed.done():
                held.placed.set_exception(
                    TransientError("the delivery is void after a lost connection")
                )
        self.held.clear()
        self.router.reset(now)

    def close(self) -> None:
        """Send all waiting requests to lanes."""
        for held in self.held.values():
            held.place(None)
        self.held.clear()
