"""All checks of `headway doctor`, in order."""

from collections.abc import AsyncIterator

from services.mesh.doctor import objects, rights, server, services
from services.mesh.doctor.findings import Finding
from shared.broker.amqp.broker import AmqpBroker
from shared.broker.amqp.connection import broker_user
from shared.broker.amqp.inspection import inspecting
from shared.contracts.base import Seconds
from shared.contracts.errors import BrokerUnavailableError, MeshError, SettingsError
from shared.runtime.clock import Clock

NAME = "headway-doctor"
TIMEOUT_S: Seconds = 1.5
"""Time limit of each step, so that all take less than 5 s together."""


async def diagnose(url: str, clock: Clock) -> AsyncIterator[Finding]:
    """
    Findings about the broker at *url*, as the services would see it.

    The doctor publishes nothing to the mesh, except one question to the leader, and removes
    everything that it has made.
    """
    try:
        async with inspecting(url, name=NAME, timeout_s=TIMEOUT_S) as inspection:
            for finding in server.on_server(inspection.server):
                yield finding
            for finding in server.on_user(broker_user(url)):
                yield finding
            exchanges, queues = await objects.existing(inspection)
            async for finding in objects.compared(inspection, exchanges, queues):
                yield finding
            async with AmqpBroker(url, client_name=NAME, timeout_s=TIMEOUT_S) as broker:
                names = frozenset(spec.name for spec in exchanges)
                async for finding in rights.checked(rights.Trial(broker, inspection, names)):
                    yield finding
                async for finding in services.answering(broker, clock):
                    yield finding
    except (BrokerUnavailableError, SettingsError) as error:
        yield server.on_refusal(error)
    except MeshError as error:
        yield server.on_trouble(error)
