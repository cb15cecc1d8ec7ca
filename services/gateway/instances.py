"""Instances of the mesh, as their statuses report them to a gateway."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog
from cachetools import FIFOCache

from shared.broker import topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker
from shared.contracts.base import Decoder, InstanceId, ModelName, Seconds, UnixTime
from shared.contracts.telemetry import InstanceStatus
from shared.models.registry import ModelRegistry
from shared.runtime.clock import Clock

log = structlog.get_logger()
SILENCE_S: Seconds = 5.0
"""Time without a status after which an instance counts as lost."""
MAX_INSTANCES = 10_000
"""Number of instances whose last statuses are kept; those that reported longest ago are dropped."""
_decode: Decoder[InstanceStatus] = Decoder(InstanceStatus)


@dataclass(slots=True, kw_only=True)
class Instances:
    """Last status of each instance."""

    registry: ModelRegistry
    clock: Clock
    _statuses: FIFOCache[InstanceId, tuple[UnixTime, InstanceStatus]] = field(
        default_factory=lambda: FIFOCache(MAX_INSTANCES)
    )

    def on_status(self, status: InstanceStatus) -> None:
        """Record a status."""
        self._statuses[status.instance_id] = (self.clock.now(), status)

    def serve(self, name: str) -> bool:
        """Return whether an instance serves a model of this name."""
        return any(name in {each.model for each in status.models} for status in self._recent())

    def engines(self, model: ModelName) -> set[str]:
        """Names of the engines that serve a base model, or can activate it."""
        return {
            status.engine
            for status in self._recent()
            if model in {each.model for each in status.models}
        }

    def can_serve(self, base: ModelName) -> bool:
        """Return whether an instance serves a base model, or can after a swap."""
        return any(
            base in {each.model for each in status.models}
            for status in self._recent()
            if not status.is_loading_first
        )

    def releasing(self, model: ModelName) -> list[InstanceId]:
        """Instances that still hold a model that was removed from the registry."""
        return sorted(s.instance_id for s in self._recent() if model in s.releasing)

    def _recent(self) -> list[InstanceStatus]:
        since = self.clock.now() - SILENCE_S
        return [status for at, status in self._statuses.values() if at >= since]

    def by_model(self) -> dict[ModelName, dict[str, object]]:
        """
        Base model -> `serving`, the number of instances on which the model is active, and `able`,
        the number of instances that can activate it or serve it.
        """
        statuses = self._recent()
        return {
            base: {
                "serving": sum(s.model == base for s in statuses),
                "able": sum(base in {each.model for each in s.models} for s in statuses),
            }
            for base in self.registry.bases
        }


class AwaitedModels:
    """
    Models that no instance has been able to serve since the start of this gateway. Models that the
    registry does not have, or no longer, are not awaited: a gateway that starts again after one was
    removed would wait without limit.

    Args:
        instances: Instances of the mesh.
        names: Base models of the setting `ready_models`.
    """

    def __init__(self, instances: Instances, names: Iterable[str]) -> None:
        self._instances = instances
        self._missing = {ModelName(name) for name in names}
        if unknown := sorted(self._missing.difference(instances.registry.bases)):
            log.warning("ready_models.unknown", models=unknown)

    def reason(self) -> str | None:
        """Why the gateway waits; None once each model could be served."""
        self._missing.intersection_update(self._instances.registry.bases)
        self._missing = {each for each in self._missing if not self._instances.can_serve(each)}
        if not self._missing:
            return None
        return f"no instance can serve {', '.join(sorted(self._missing))} yet"


@asynccontextmanager
async def followed(broker: Broker, instances: Instances) -> AsyncIterator[None]:
    """Context in which *instances* gets every status."""
    queue = topology.temporary_queue("gateway")
    bindings = [(topology.TELEMETRY, topology.STATUS_KEYS)]
    async with listening(broker, queue, _decode, bindings, instances.on_status):
        yield
