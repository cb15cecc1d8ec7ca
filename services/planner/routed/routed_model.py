"""State of one model in a grouper that routes: its router, and requests that wait to be sent."""

import asyncio
from dataclasses import dataclass, field

from services.planner.routed.model_router import ModelRouter
from shared.contracts.base import InstanceId, RequestId, UnixTime
from shared.contracts.errors import TransientError
from shared.contracts.requests import QueuedRequest
from solver.routing.device_prefills import DeviceKey


@dataclass(slots=True)
class Held:
    """A request that waits to be sent; its delivery remains unacknowledged."""

    request: QueuedRequest
    since: UnixTime
    placed: asyncio.Future[InstanceId | None]
    """Instance to which the request is sent; None if the request goes to its lane."""

    def place(self, instance_id: InstanceId | None) -> None:
        """End the request's wait with a result: the chosen instance, or None for the lane."""
        if not self.placed.done():
            self.placed.set_result(instance_id)


@dataclass(slots=True)
class RoutedModel:
    """State of one model in a grouper that routes requests; the class does no IO."""

    router: ModelRouter
    held: dict[RequestId, Held] = field(default_factory=dict)
    last_residual: dict[str, int] = field(default_factory=dict)
    """Version of the corrected model -> number of the last published residual."""
    trees: dict[DeviceKey, int] = field(default_factory=dict)
    """Engine and device -> version of the quantile trees that the router uses."""
    heard: dict[str, UnixTime] = field(default_factory=dict)
    """Other groupers that route requests of the model -> time of their last message."""

    def dispatch(self, now: UnixTime) -> None:
        """Release the waiting requests that can be sent now."""
        for assignment in self.router.router.dispatch(now):
            held = self.held.pop(assignment.request.request_id, None)
            if held is not None:
                held.place(assignment.instance_id)

    def lose(self, instance_id: InstanceId, now: UnixTime) -> None:
        """
        Remove an instance and reassign the requests that wait for it.

        If no other instance serves the model, the requests go to their lanes.
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
        """Cancel a waiting request; no-op if it was already sent."""
        if self.held.pop(key, None) is not None:
            self.router.router.discard(key, now)

    def give_up(self, before: UnixTime, now: UnixTime) -> None:
        """Release to their lanes all requests that began to wait before the time *before*."""
        for key in [key for key, held in self.held.items() if held.since < before]:
            self.held[key].place(None)
            self.withdraw(key, now)

    def void(self, now: UnixTime) -> None:
        """
        Drop waiting requests, which the broker redelivers to any grouper.

        Sent requests are dropped also, since this grouper may have missed their first tokens.
        """
        for held in self.held.values():
            if not held.placed.done():
                held.placed.set_exception(
                    TransientError("the delivery is void after a lost connection")
                )
        self.held.clear()
        self.router.reset(now)

    def close(self) -> None:
        """Release all waiting requests to their lanes."""
        for held in self.held.values():
            held.place(None)
        self.held.clear()
