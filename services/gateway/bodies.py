"""The front that passes all bodies on: to engines of the mesh and to servers of others."""

import math
from collections.abc import Iterator, Mapping

from starlette.applications import Starlette

from services.gateway.application import application_of
from services.gateway.door import Door
from services.gateway.pass_through import PassThrough
from services.gateway.state import Gateway
from shared.api.calls import MOST_TOKEN_BYTES
from shared.contracts.base import ModelName
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.runtime.health import Health


def bodies_front(gateway: Gateway, health: Health) -> Starlette:
    """The ASGI application of a gateway that knows nothing of the models but their names."""
    readers = _Readers(gateway.registry, PassThrough(gateway.producer))

    def most_chars(model: ModelName) -> float:
        entry = gateway.registry.entry(model)
        return math.inf if entry.takes_bodies else entry.max_model_len * MOST_TOKEN_BYTES

    door = Door(gateway, readers, most_chars=most_chars)
    return application_of(gateway, health, door, lambda: b"{}")


class NoSteps:
    """The gateway has nothing to do about changes of the registry."""

    async def add(self, entry: ModelEntry) -> None:
        """No-op."""

    async def replace(self, entry: ModelEntry) -> None:
        """No-op."""

    async def remove(self, model: ModelName) -> None:
        """No-op."""


class _Readers(Mapping[ModelName, PassThrough]):
    """Base model -> its application; follows the registry."""

    def __init__(self, registry: ModelRegistry, application: PassThrough) -> None:
        self._registry = registry
        self._application = application

    def __getitem__(self, model: ModelName) -> PassThrough:
        if model not in self._registry.bases:
            raise KeyError(model)
        return self._application

    def __iter__(self) -> Iterator[ModelName]:
        return iter(self._registry.bases)

    def __len__(self) -> int:
        return len(self._registry.bases)
