"""Reports to agents for which files of each model a gateway renders requests."""

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.contracts.base import ModelName
from shared.contracts.control import GatewayModels
from shared.contracts.errors import BrokerUnavailableError
from shared.contracts.telemetry import RegistryState
from shared.tenants.policies import PolicySource


class Reporter:
    """
    Publishes the digests of a gateway's models.

    Args:
        broker: Connection of the gateway.
        digests: Base model -> digest; contains models that are added later.
        registry: Returns the state of the gateway's registry.
        policies: Policies of tenants.
    """

    def __init__(
        self,
        broker: Broker,
        digests: Mapping[ModelName, str],
        registry: Callable[[], RegistryState],
        policies: PolicySource | None = None,
    ) -> None:
        self._policies = policies
        self._broker = broker
        self._registry = registry
        self._digests = digests
        self._gateway = f"gateway-{secrets.token_hex(6)}"

    async def report(self) -> None:
        """
        Publish the digests and the state of the registry; agents do not serve models of which they
        have other files.
        """
        policies = None if self._policies is None else self._policies.state
        message = GatewayModels(
            gateway=self._gateway,
            digests=dict(self._digests),
            registry=self._registry(),
            tenants=policies if policies is not None and policies.digest else None,
        )
        out = OutMessage.transient(message)
        # With a confirm: those in a row that do not come show that the broker is away.
        with suppress(BrokerUnavailableError):
            await self._broker.publish(topology.CONTROL, topology.CONTROL_GATEWAYS, out)
