"""The verb `tail`: requests of the whole mesh as they complete."""

import argparse
import asyncio
from datetime import UTC, datetime
from uuid import uuid4

from services.gateway.metrics import TIERS
from services.gateway.settings import Settings
from shared.broker import topology
from shared.broker.connect import open_broker
from shared.broker.protocol import BindingSpec, Broker, Delivery, Settlement
from shared.contracts.base import Decoder
from shared.contracts.errors import ContractError
from shared.contracts.telemetry import RequestObserved, Telemetry
from shared.runtime.cli import print_data
from shared.runtime.lifecycle import EXIT_OK, run_until_stopped

PREFETCH = 100


def add_tail_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `tail`."""
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N", help="stop after N requests (0: never)"
    )


async def tail(settings: Settings, arguments: argparse.Namespace) -> int:
    """Follow the mesh's observations; a line each, or JSON with `--json`."""
    observed: asyncio.Queue[RequestObserved] = asyncio.Queue()

    async def main(stop: asyncio.Event) -> None:
        async with open_broker(settings.amqp_url, client_name="gateway tail") as broker:
            await follow(broker, observed)
            await print_until(stop, observed, arguments)

    await run_until_stopped(main)
    return EXIT_OK


async def follow(broker: Broker, observed: "asyncio.Queue[RequestObserved]") -> None:
    """Put every request that completes from now on into *observed*, while *broker* is open."""
    decode: Decoder[Telemetry] = Decoder(Telemetry)
    queue = topology.private_queue(f"tail.{uuid4().hex}")

    async def on_observation(delivery: Delivery) -> None:
        try:
            message = decode(delivery.body)
        except ContractError:
            # A kind newer than this program; `tail` is only a window.
            message = None
        if isinstance(message, RequestObserved):
            observed.put_nowait(message)
        await delivery.settle(Settlement.ACK)

    await topology.declare(broker)
    await broker.declare_queue(queue)
    await broker.bind(
        BindingSpec(
            exchange=topology.TELEMETRY, queue=queue.name, routing_key=topology.OBSERVED_REQUEST_KEY
        )
    )
    await broker.consume(queue.name, on_observation, prefetch=PREFETCH)


def line(request: RequestObserved) -> str:
    """One request for people, on one line."""
    at = datetime.fromtimestamp(request.finished_at, UTC).strftime("%H:%M:%S")
    return (
        f"{at} {'met ' if request.attained else 'LATE'} {TIERS[request.qos_class]:<11} "
        f"{request.model} on {request.instance_id} for {request.tenant}: "
        f"{request.prompt_tokens} in, {request.output_tokens} out, "
        f"queued {request.submitted_at - request.arrived_at:.3f} s, "
        f"first token {request.first_token_at - request.arrived_at:.3f} s, "
        f"whole {request.finished_at - request.arrived_at:.3f} s"
    )


async def print_until(
    stop: asyncio.Event, observed: "asyncio.Queue[RequestObserved]", arguments: argparse.Namespace
) -> None:
    """Print what comes in *observed* until *stop* is set or the limit is reached."""
    printed = 0
    async with asyncio.TaskGroup() as group:
        stopping = group.create_task(stop.wait(), name="tail stop")
        while not stop.is_set() and (not arguments.limit or printed < arguments.limit):
            getting = group.create_task(observed.get(), name="tail next")
            await asyncio.wait({getting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                getting.cancel()
                break
            request = getting.result()
            if arguments.json:
                print_data(request, as_json=True)
            else:
                print(line(request), flush=True)  # noqa: T201 - a verb's output
            printed += 1
        stopping.cancel()
