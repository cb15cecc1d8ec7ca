"""Waiting until every part of a mesh is there."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress

from services.mesh.spec import MeshSpec
from shared.broker import topology
from shared.broker.protocol import BindingSpec, Broker, Delivery, Settlement
from shared.contracts.base import Decoder
from shared.contracts.errors import ContractError, MeshError
from shared.contracts.telemetry import InstanceStatus, LanesObserved

_decode: Decoder[InstanceStatus | LanesObserved] = Decoder(InstanceStatus | LanesObserved)
POLL_S = 0.1


async def wait_ready(
    broker: Broker, spec: MeshSpec, *, timeout_s: float, check: Callable[[], None]
) -> None:
    """
    Return once all agents and groupers have been heard and the gateway is ready.

    Args:
        broker: A client of the mesh's broker.
        spec: What to wait for.
        timeout_s: Limit.
        check: Raises when something has ended meanwhile.

    Raises:
        MeshError: Not ready in time; says what is missing.
    """
    agents: set[str] = set()
    groupers: set[str] = set()

    async def on_state(delivery: Delivery) -> None:
        with suppress(ContractError):  # a newer kind than this command knows
            message = _decode(delivery.body)
            if isinstance(message, InstanceStatus):
                agents.add(message.instance_id)
            else:
                groupers.add(message.sender)
        await delivery.settle(Settlement.ACK)

    await topology.declare(broker)
    queue = topology.passing_queue("ready")
    await broker.declare_queue(queue)
    for key in ("status.#", "lanes.#"):
        await broker.bind(
            BindingSpec(exchange=topology.TELEMETRY, queue=queue.name, routing_key=key)
        )
    subscription = await broker.consume(queue.name, on_state, prefetch=64)
    wanted = {agent.instance_id for agent in spec.agents}
    try:
        async with asyncio.timeout(timeout_s):
            while not (
                wanted <= agents
                and len(groupers) >= spec.groupers
                and await asyncio.to_thread(_gateway_ready, spec.gateway_url)
            ):
                check()
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        missing = ", ".join(sorted(wanted - agents)) or "none"
        raise MeshError(
            f"the mesh is not ready after {timeout_s:g} s: silent agents: {missing}; groupers "
            f"heard: {len(groupers)} of {spec.groupers}; logs are in {spec.log_dir}"
        ) from error
    finally:
        await subscription.cancel()


def _gateway_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2):  # noqa: S310 - our own http URL
            return True
    except OSError:
        return False
