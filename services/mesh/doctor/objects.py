"""Exchanges and queues that exist, compared with those that Headway declares."""

import re
from collections.abc import AsyncIterator, Awaitable

from services.mesh.doctor.findings import Finding, deviation, note, ok
from shared.broker import topology
from shared.broker.amqp.inspection import Inspection
from shared.broker.protocol import ExchangeSpec, QueueSpec
from shared.contracts.errors import BrokerAccessError, BrokerConflictError

_ARGUMENT = re.compile(r"inequivalent arg '(?P<name>[^']+)'.*?: (?P<values>received .*?)(?:'\)|$)")


async def existing(inspection: Inspection) -> tuple[list[ExchangeSpec], list[QueueSpec]]:
    """The mesh's exchanges and queues that exist."""
    exchanges = [spec for spec in topology.EXCHANGES if await inspection.has_exchange(spec.name)]
    queues = [spec for spec in topology.QUEUES if await inspection.has_queue(spec.name)]
    return exchanges, queues


async def compared(
    inspection: Inspection, exchanges: list[ExchangeSpec], queues: list[QueueSpec]
) -> AsyncIterator[Finding]:
    """Differences between existing objects and their specs, and objects that are missing."""
    compared_exchanges = [
        await _difference(f"exchange {each.name}", inspection.compare_exchange(each))
        for each in exchanges
    ]
    compared_queues = [
        await _difference(f"queue {each.name}", inspection.compare_queue(each)) for each in queues
    ]
    compared_all = compared_exchanges + compared_queues
    differences = [each for each in compared_all if isinstance(each, Finding)]
    for difference in differences:
        yield difference
    if hidden := [each for each in compared_all if isinstance(each, str)]:
        yield note(
            "objects",
            f"the user may not compare {len(hidden)} of {len(compared_all)} objects",
            so="differences from what services declare stay unknown",
            do="run the doctor as a user that may configure them",
        )
    if not exchanges and not queues:
        yield note(
            "objects",
            "none of the mesh's exchanges and queues exist",
            so="the first service that may declare them creates them",
        )
        return
    known = {each.name for each in exchanges} | {each.name for each in queues}
    every = [each.name for each in topology.EXCHANGES] + [each.name for each in topology.QUEUES]
    if missing := [name for name in every if name not in known]:
        yield deviation(
            "objects",
            f"missing: {', '.join(missing)}",
            so="messages to them are returned to their senders",
            do="start a planner as a user that may declare them, or import "
            "ops/rabbitmq/definitions.json",
        )
    elif not (differences or hidden):
        yield ok("objects", f"{len(exchanges)} exchanges and {len(queues)} queues are as declared")


async def _difference(what: str, comparison: Awaitable[None]) -> Finding | str | None:
    """The difference of an object; its name if the user may not compare it; None if it is equal."""
    try:
        await comparison
    except BrokerAccessError:
        return what
    except BrokerConflictError as error:
        found = _ARGUMENT.search(str(error))
        difference = f"{found['name']}, {found['values']}" if found else str(error)
        return deviation(
            "objects",
            f"{what} exists with another {difference}",
            so="services that declare it fail with PRECONDITION_FAILED",
            do=f"stop the mesh, delete {what} when it is empty, and start a planner",
        )
    return None
