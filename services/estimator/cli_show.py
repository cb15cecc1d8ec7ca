"""`headway-estimator show`: prints profiles and the quality of routers' predictions."""

import asyncio
import sys
from typing import Annotated

import msgspec

from services.estimator.profile_report import lines_of
from services.estimator.settings import Settings
from shared.broker import topology
from shared.broker.listening import listening
from shared.contracts.base import Decoder
from shared.contracts.estimates import Profile
from shared.contracts.routing import RouterState, SoftState
from shared.runtime.cli import broker_factory, print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import LOADED, AsJson

_decode: Decoder[Profile | RouterState] = Decoder(Profile | RouterState)


class _Latest:
    """The latest message about each profile and from each router."""

    def __init__(self) -> None:
        self.profiles: dict[tuple[str, str, str], Profile] = {}
        self.routers: dict[tuple[str, str], RouterState] = {}

    def on_message(self, message: Profile | RouterState) -> None:
        """Store *message* without the fields that only other routers need."""
        if isinstance(message, Profile):
            self.profiles[message.model, message.engine, message.device] = message
        elif message.trusts:
            self.routers[message.model, message.sender] = msgspec.structs.replace(
                message, work=SoftState(), calibrations=()
            )


async def show(*, settings: Annotated[Settings, LOADED], json: AsJson = False) -> int:
    """Print the profiles that are published within one refresh period."""
    heard = _Latest()
    async with broker_factory(settings.amqp_url)("headway-estimator-show") as broker:
        queue = topology.temporary_queue("show-profiles")
        bindings = [(topology.PROFILES, ""), (topology.TELEMETRY, topology.ROUTER_KEY)]
        async with listening(broker, queue, _decode, bindings, heard.on_message):
            await asyncio.sleep(settings.refresh_period_s + 1.0)
    if not heard.profiles:
        print(
            "no profile received: is an estimator running, and has it received telemetry?",
            file=sys.stderr,
        )
        return EXIT_FAILED
    profiles = [profile for _, profile in sorted(heard.profiles.items())]
    routers = [state for _, state in sorted(heard.routers.items())]
    if json:
        for message in (*profiles, *routers):
            print_data(message, as_json=True)
    else:
        print("\n".join(lines_of(profiles, routers, now=SystemClock().now())))
    return EXIT_OK
