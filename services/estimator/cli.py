"""`headway-estimator`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress

from services.estimator.cli_fit import fit, fit_arguments
from services.estimator.cli_trees import trees, use, use_arguments
from services.estimator.service import serve
from services.estimator.settings import Settings
from services.estimator.shown import lines_of
from shared.broker import topology
from shared.broker.protocol import BindingSpec, Delivery, Settlement
from shared.contracts.base import Decoder
from shared.contracts.errors import ContractError
from shared.contracts.estimates import Profile
from shared.runtime.cli import ServiceCli, Verb, broker_factory, print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK

_decode_profile: Decoder[Profile] = Decoder(Profile)


async def show(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print the profiles, listening for one refresh period."""
    profiles: dict[tuple[str, str, str], Profile] = {}

    async def on_profile(delivery: Delivery) -> None:
        with suppress(ContractError):  # a newer kind than this command knows
            profile = _decode_profile(delivery.body)
            profiles[profile.model, profile.engine, profile.device] = profile
        await delivery.settle(Settlement.ACK)

    async with broker_factory(settings.amqp_url)("headway-estimator-show") as broker:
        queue = topology.passing_queue("show-profiles")
        await broker.declare_queue(queue)
        await broker.bind(BindingSpec(exchange=topology.PROFILES, queue=queue.name, routing_key=""))
        subscription = await broker.consume(queue.name, on_profile, prefetch=64)
        await asyncio.sleep(settings.refresh_period_s + 1.0)
        await subscription.cancel()
    if not profiles:
        print("no profile in sight: is an estimator running, has work been done?", file=sys.stderr)
        return EXIT_FAILED
    if arguments.json:
        for _, profile in sorted(profiles.items()):
            print_data(profile, as_json=True)
    else:
        known = [profile for _, profile in sorted(profiles.items())]
        print("\n".join(lines_of(known, now=SystemClock().now())))
    return EXIT_OK


CLI = ServiceCli(
    service="estimator",
    description="Learns from telemetry what iterations, requests and swaps cost.",
    settings_type=Settings,
    serve=serve,
    verbs=(
        Verb(
            name="show",
            help="print the profiles: latency model, rates, lengths, swaps, trees; and residuals",
            run=show,
        ),
        Verb(
            name="fit",
            help="learn quantile trees of prefill times from the samples in profile_dir; running "
            "estimators publish what is written",
            run=fit,
            arguments=fit_arguments,
        ),
        Verb(name="trees", help="list the trees in profile_dir", run=trees),
        Verb(
            name="use",
            help="write an earlier version of a model's trees as its next one: the way back",
            run=use,
            arguments=use_arguments,
        ),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    return CLI.main(argv)
