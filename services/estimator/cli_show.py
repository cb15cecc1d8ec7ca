"""`headway-estimator show`: profiles, and how routers' predictions do."""

import argparse
import asyncio
import sys
from contextlib import suppress

import msgspec

from services.estimator.settings import Settings
from services.estimator.shown import lines_of
from shared.broker import topology
from shared.broker.protocol import BindingSpec, Delivery, Settlement
from shared.contracts.base import Decoder
from shared.contracts.errors import ContractError
from shared.contracts.estimates import Profile
from shared.contracts.routing import RouterState, SoftState
from shared.runtime.cli import broker_factory, print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK

_decode: Decoder[Profile | RouterState] = Decoder(Profile | RouterState)


class _Heard:
    """The latest of each profile and of each router."""

    def __init__(self) -> None:
        self.profiles: dict[tuple[str, str, str], Profile] = {}
        self.routers: dict[tuple[str, str], RouterState] = {}

    async def on_message(self, delivery: Delivery) -> None:
        """Kinds that this command does not know are passed over."""
        with suppress(ContractError):
            message = _decode(delivery.body)
            if isinstance(message, Profile):
                self.profiles[message.model, message.engine, message.device] = message
            elif message.trusts:
                # What routers tell each other for themselves is of no use to people.
                self.routers[message.model, message.sender] = msgspec.structs.replace(
                    message, work=SoftState(), calibrations=()
                )
        await delivery.settle(Settlement.ACK)


async def show(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the profiles, listening for one refresh period."""
    heard = _Heard()
    async with broker_factory(settings.amqp_url)("headway-estimator-show") as broker:
        queue = topology.passing_queue("show-profiles")
        await broker.declare_queue(queue)
        for exchange, key in (
            (topology.PROFILES, ""),
            (topology.TELEMETRY, topology.ROUTER_KEY),
        ):
            await broker.bind(BindingSpec(exchange=exchange, queue=queue.name, routing_key=key))
        subscription = await broker.consume(queue.name, heard.on_message, prefetch=64)
        await asyncio.sleep(settings.refresh_period_s + 1.0)
        await subscription.cancel()
    if not heard.profiles:
        print("no profile in sight: is an estimator running, has work been done?", file=sys.stderr)
        return EXIT_FAILED
    profiles = [profile for _, profile in sorted(heard.profiles.items())]
    routers = [state for _, state in sorted(heard.routers.items())]
    if arguments.json:
        for message in (*profiles, *routers):
            print_data(message, as_json=True)
    else:
        print("\n".join(lines_of(profiles, routers, now=SystemClock().now())))
    return EXIT_OK
