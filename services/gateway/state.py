"""State shared by all requests of one gateway."""

import asyncio
from dataclasses import dataclass, field

from services.gateway.body import BodyMemory
from services.gateway.fallbacks import Fallbacks
from services.gateway.instances import Instances
from services.gateway.metrics import GatewayMetrics
from services.gateway.rate_limits import RateLimits
from services.gateway.settings import Settings
from services.gateway.tenants import Tenants
from shared.broker.protocol import Broker
from shared.contracts.errors import ContractError
from shared.models.registry import ModelRegistry
from shared.producer.producer import Producer
from shared.runtime.clock import Clock, SystemClock
from shared.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Components that all requests share; `service.py` connects them."""

    settings: Settings
    registry: ModelRegistry
    fallbacks: Fallbacks
    tenants: Tenants
    bodies: BodyMemory
    producer: Producer
    instances: Instances
    metrics: GatewayMetrics
    clock: Clock
    store: Store | None = None
    """None if no store is configured."""
    stop: asyncio.Event
    """Set when the gateway stops; the gateway then accepts no new requests."""
    limits: RateLimits = field(default_factory=lambda: RateLimits(SystemClock()))
    broker: Broker | None = None
    """Connection for questions about usage."""

    def usable_store(self) -> Store:
        """
        The store, if it can be used.

        Raises:
            ContractError: There is none.
            StoreUnavailableError: It cannot be used now.
        """
        return usable(self.store)


def usable(store: Store | None) -> Store:
    """
    A store that can be used.

    Raises:
        ContractError: None is configured.
        StoreUnavailableError: It cannot be used now.
    """
    if store is None:
        raise ContractError(
            "this gateway has no store: set store.data_dir, or store.url and store.files",
            code="store_not_configured",
            status=501,
        )
    store.require()
    return store
