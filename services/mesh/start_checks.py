"""Checks before a mesh starts: its ports are free, and its instances do not run already."""

import asyncio

from services.mesh.spec import MeshSpec
from shared.broker import topology
from shared.broker.declaring import declare_topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker
from shared.contracts.base import Decoder, Seconds
from shared.contracts.errors import SettingsError
from shared.contracts.telemetry import InstanceStatus
from shared.runtime.health import check_port

_decode: Decoder[InstanceStatus] = Decoder(InstanceStatus)
LISTEN_S: Seconds = 1.5
"""Agents report each second."""


def check_ports(spec: MeshSpec) -> None:
    """
    Check that the gateways could listen.

    Raises:
        SettingsError: A port is in use.
    """
    for port in spec.gateway_ports:
        check_port(spec.gateway_host, port)


async def check_instances(broker: Broker, spec: MeshSpec) -> None:
    """
    Check that no other mesh at the broker has an instance of this one: two instances with one id
    take each other's requests.

    Raises:
        SettingsError: An id is in use; the message names it.
    """
    seen: set[str] = set()
    await declare_topology(broker)
    bindings = [(topology.TELEMETRY, topology.STATUS_KEYS)]
    queue = topology.temporary_queue("start")
    async with listening(
        broker, queue, _decode, bindings, lambda status: seen.add(status.instance_id)
    ):
        await asyncio.sleep(LISTEN_S)
    used = sorted(agent.instance_id for agent in spec.agents if agent.instance_id in seen)
    if used:
        raise SettingsError(
            f"{', '.join(used)} already runs at this broker: stop the other mesh, or give this one "
            "a broker or a virtual host of its own (--broker)"
        )
