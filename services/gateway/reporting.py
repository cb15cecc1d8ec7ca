"""Reports to agents for which files of each model a gateway renders requests."""

import secrets
from collections.abc import Callable, Mapping

from shared.broker import topology
from shared.broker.protocol import Broker, OutMessage
from shared.broker.retry import send_best_effort
from shared.contracts.base import ModelName, encode, tag_of
from shared.contracts.control import GatewayModels
from shared.contracts.telemetry import RegistryState


class Reporter:
    """
    Publishes the digests of a gateway's models.

    Args:
        broker: Connection of the gateway.
        digests: Base model -> digest; contains models that are added later.
        registry: Returns the state of the gateway's registry.
    """

    def __init__(
        self,
        broker: Broker,
        digests: Mapping[ModelName, str],
        registry: Callable[[], RegistryState],
    ) -> None:
        self._broker = broker
        self._registry = registry
        self._digests = digests
        self._gateway = f"gateway-{secrets.token_hex(6)}"

    async def report(self) -> None:
        """
        Publish the digests and the state of the registry; agents do not serve models of which they
        have other files.
        """
        message = GatewayModels(
            gateway=self._gateway, digests=dict(self._digests), registry=self._registry()
        )
        out = OutMessage(body=encode(message), kind=tag_of(GatewayModels), persistent=False)
        await send_best_effort(self._broker, topology.CONTROL, topology.CONTROL_GATEWAYS, out)
