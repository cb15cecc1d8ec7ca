"""`headway-gateway tail`: prints requests of the whole mesh as they end on an instance."""

import asyncio
from datetime import UTC, datetime
from itertools import count
from typing import Annotated

from services.gateway.settings import Settings
from shared.broker import topology
from shared.broker.connect import open_broker
from shared.broker.declaring import declare_topology
from shared.broker.listening import listening
from shared.contracts.base import Decoder
from shared.contracts.telemetry import RequestObserved
from shared.runtime.cli import print_data
from shared.runtime.lifecycle import EXIT_OK, run_until_stopped
from shared.runtime.options import LOADED, AsJson, whole

_decode: Decoder[RequestObserved] = Decoder(RequestObserved)
COMPLETED = "completed"
"""Outcome of a request with its whole answer; others are error codes."""


async def tail(
    *,
    settings: Annotated[Settings, LOADED],
    limit: Annotated[int, whole(least=0)] = 0,
    json: AsJson = False,
) -> int:
    """
    Print one line for each request that ends on an instance.

    Args:
        limit: Stop after N requests; 0: never.
    """
    observed: asyncio.Queue[RequestObserved] = asyncio.Queue()

    async def main(stop: asyncio.Event) -> None:
        async with open_broker(settings.amqp_url, client_name="gateway tail") as broker:
            await declare_topology(broker)
            queue = topology.temporary_queue("tail")
            bindings = [(topology.TELEMETRY, topology.OBSERVED_REQUEST_KEY)]
            async with listening(broker, queue, _decode, bindings, observed.put_nowait):
                await print_until(stop, observed, limit=limit, as_json=json)

    await run_until_stopped(main)
    return EXIT_OK


def line(request: RequestObserved) -> str:
    """Format one finished request as a line of text, with the times of the stages it reached."""
    at = datetime.fromtimestamp(request.finished_at, UTC).strftime("%H:%M:%S")
    is_completed = request.outcome == COMPLETED
    verdict = ("met " if request.attained else "LATE") if is_completed else "FAIL"
    stages = {
        "queued": request.submitted_at,
        "first token": request.first_token_at,
        "whole" if is_completed else f"{request.outcome} after": request.finished_at,
    }
    times = ", ".join(
        f"{name} {reached_at - request.arrived_at:.3f} s"
        for name, reached_at in stages.items()
        if reached_at
    )
    return (
        f"{at} {verdict} {request.qos_class.value:<15} "
        f"{request.model} on {request.instance_id} for {request.tenant}: "
        f"{request.prompt_tokens} in, {request.output_tokens} out, {times}"
    )


async def print_until(
    stop: asyncio.Event,
    observed: "asyncio.Queue[RequestObserved]",
    *,
    limit: int = 0,
    as_json: bool = False,
) -> None:
    """Print the requests *observed* until *stop* is set or *limit* lines are printed."""

    async def print_all() -> None:
        for printed in count(1):
            request = await observed.get()
            if as_json:
                print_data(request, as_json=True)
            else:
                print(line(request), flush=True)  # noqa: T201 - a verb's output
            if printed == limit:
                stop.set()
                return

    async with asyncio.TaskGroup() as group:
        printing = group.create_task(print_all(), name="tail")
        await stop.wait()
        printing.cancel()
