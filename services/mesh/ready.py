"""Waits until every service of a mesh is ready."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence

from services.mesh.spec import MeshSpec
from shared.broker import topology
from shared.broker.declaring import declare_topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker
from shared.contracts.base import Decoder
from shared.contracts.errors import MeshError
from shared.contracts.telemetry import InstanceStatus, LanesObserved

_decode: Decoder[InstanceStatus | LanesObserved] = Decoder(InstanceStatus | LanesObserved)
POLL_S = 0.1


async def wait_ready(
    broker: Broker, spec: MeshSpec, *, timeout_s: float, check: Callable[[], Awaitable[None]]
) -> None:
    """
    Wait until all agents and groupers have published messages and the gateways are ready.

    Args:
        broker: A client of the mesh's broker.
        spec: Specification of the mesh.
        timeout_s: Time limit.
        check: Raises an error if a service has ended.

    Raises:
        MeshError: The mesh is not ready in time; the message names the missing services.
    """
    agents: set[str] = set()
    groupers: set[str] = set()

    def on_state(message: InstanceStatus | LanesObserved) -> None:
        if isinstance(message, InstanceStatus):
            agents.add(message.instance_id)
        else:
            groupers.add(message.sender)

    await declare_topology(broker)
    queue = topology.temporary_queue("ready")
    bindings = [(topology.TELEMETRY, key) for key in (topology.STATUS_KEYS, topology.LANES_KEY)]
    wanted = {agent.instance_id for agent in spec.agents}
    try:
        async with (
            listening(broker, queue, _decode, bindings, on_state),
            asyncio.timeout(timeout_s),
        ):
            while not (
                all(_reports(name, agents) for name in wanted)
                and len(groupers) >= spec.groupers
                and await asyncio.to_thread(_are_ready, spec.gateway_urls)
            ):
                await check()
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        silent = sorted(name for name in wanted if not _reports(name, agents))
        missing = ", ".join(silent) or "none"
        raise MeshError(
            f"the mesh is not ready after {timeout_s:g} s: no status from agents: {missing}; "
            f"groupers with reports: {len(groupers)} of {spec.groupers}; logs are in "
            f"{spec.log_dir}"
        ) from error


def _reports(agent: str, instances: set[str]) -> bool:
    """
    True if an agent has an instance that has reported; ids of attached servers begin with its id.
    """
    return any(each == agent or each.startswith(f"{agent}-") for each in instances)


def _are_ready(gateways: Sequence[str]) -> bool:
    try:
        for url in gateways:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):  # noqa: S310 - our own http URL
                pass
    except OSError:
        return False
    return True
