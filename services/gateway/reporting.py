"""Reports of the registry and the policies that a gateway follows."""

import secrets
from collections.abc import Callable
from contextlib import suppress

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.contracts.control import GatewayStatus
from shared.contracts.errors import BrokerUnavailableError
from shared.contracts.telemetry import RegistryState
from shared.tenants.policies import PolicySource


class Reporter:
    """
    Publishes the state of a gateway.

    Args:
        broker: Connection of the gateway.
        registry: Returns the state of the gateway's registry.
        policies: Policies of tenants.
    """

    def __init__(
        self,
        broker: Broker,
        registry: Callable[[], RegistryState],
        policies: PolicySource | None = None,
    ) -> None:
        self._policies = policies
        self._broker = broker
        self._registry = registry
        self._gateway = f"gateway-{secrets.token_hex(6)}"

    async def report(self) -> None:
        """Publish the states of the registry and of the policies."""
        policies = None if self._policies is None else self._policies.state
        message = GatewayStatus(
            gateway=self._gateway,
            registry=self._registry(),
            tenants=policies if policies is not None and policies.digest else None,
        )
        out = OutMessage.transient(message)
        # With a confirm: those in a row that do not come show that the broker is away.
        with suppress(BrokerUnavailableError):
            await self._broker.publish(topology.CONTROL, topology.CONTROL_GATEWAYS, out)
