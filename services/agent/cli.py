"""`headway-agent`: command line of the agent."""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from services.agent.settings import Settings
from shared.broker import topology
from shared.broker.listening import listening
from shared.broker.protocol import Broker, OutMessage, PublishOutcome
from shared.contracts.base import Decoder, InstanceId, Seconds
from shared.contracts.control import DrainInstance
from shared.contracts.telemetry import InstanceStatus
from shared.runtime.cli import Service, ServiceCli, broker_factory, print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import LOADED, AsJson, SecondsOption

Loaded = Annotated[Settings, LOADED]
_decode_status: Decoder[InstanceStatus] = Decoder(InstanceStatus)
ANSWER_TIMEOUT_S = 5.0


async def next_status(
    broker: Broker, instance_id: str, *, timeout_s: float = ANSWER_TIMEOUT_S
) -> InstanceStatus | None:
    """Return the next status of an instance; None if it publishes none in time."""
    found: asyncio.Future[InstanceStatus] = asyncio.get_running_loop().create_future()

    def on_status(status: InstanceStatus) -> None:
        if not found.done():
            found.set_result(status)

    queue = topology.temporary_queue(f"snapshot.{instance_id}")
    bindings = [(topology.TELEMETRY, topology.status_key(instance_id))]
    async with listening(broker, queue, _decode_status, bindings, on_status):
        try:
            return await asyncio.wait_for(found, timeout_s)
        except TimeoutError:
            return None


async def snapshot(*, settings: Loaded, json: AsJson = False) -> int:
    """Print the state of the instance: model, window, runs, totals."""
    async with broker_factory(settings.amqp_url)("headway-snapshot") as broker:
        status = await next_status(broker, settings.instance_id)
    if status is None:
        print(
            f"no status from instance {settings.instance_id!r}: is its agent running?",
            file=sys.stderr,
        )
        return EXIT_FAILED
    print_data(status, as_json=json)
    return EXIT_OK


async def drain(
    *,
    settings: Loaded,
    exits: Annotated[bool, Parameter(name="--exit")] = False,
    timeout_s: Annotated[SecondsOption, Parameter(name="--timeout")] = 60.0,
    json: AsJson = False,
) -> int:
    """
    Stop pulling on the instance and wait until it is empty.

    Args:
        exits: End the agent's process once it is empty.
        timeout_s: Time limit of the wait; the instance continues to drain after the limit.
    """
    instance_id = InstanceId(settings.instance_id)
    command = DrainInstance(instance_id=instance_id, exit=exits)
    async with broker_factory(settings.amqp_url)("headway-drain") as broker:
        outcome = await broker.publish(
            topology.CONTROL, topology.command_instance(instance_id), OutMessage.transient(command)
        )
        if outcome is not PublishOutcome.CONFIRMED:
            print(f"no agent with the instance id {instance_id!r} is connected", file=sys.stderr)
            return EXIT_FAILED
        drained = await _emptied(broker, instance_id, exits=exits, timeout_s=timeout_s)
    print_data({"instance_id": instance_id, "drained": drained}, as_json=json)
    return EXIT_OK if drained else EXIT_FAILED


async def _emptied(
    broker: Broker, instance_id: InstanceId, *, exits: bool, timeout_s: Seconds
) -> bool:
    """
    Wait until an instance reports that it is empty.

    With *exits*, an instance that stops reporting counts as empty.
    """
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        status = await next_status(broker, instance_id)
        if status is None:
            if not exits:
                print(
                    f"instance {instance_id!r} stopped reporting; it may have died", file=sys.stderr
                )
            return exits
        if status.draining and status.running + status.waiting == 0:
            return True
        print(f"{status.running} running, {status.waiting} waiting", file=sys.stderr)
    print(f"not empty after {timeout_s:g} s; the instance continues to drain", file=sys.stderr)
    return False


def _parts() -> Service[Settings]:
    from services.agent import service  # noqa: PLC0415 - `health` needs no engine

    return Service(serve=service.serve, check=service.check)


class AgentCli(ServiceCli[Settings]):
    """The command line of the agent."""

    def serve(
        self,
        *,
        settings: Loaded,
        devices: Annotated[str | None, Parameter(metavar="IDS")] = None,
    ) -> int:
        """
        Serve until SIGTERM, then drain.

        Args:
            devices: GPUs of this agent, e.g. 2, 0,1 or GPU-5c8a; no other agent can take them.
        """
        # The command line has put the option into the settings.
        del devices
        return super().serve(settings=settings)


CLI = AgentCli(
    service="agent",
    text="Serves one LLM instance: pulls, runs and streams requests, executes LSOs.\n\n"
    "Verbs that start or ask an instance need its name: --set instance_id=NAME or "
    "HEADWAY_AGENT_INSTANCE_ID. `snapshot` and `drain` also need a broker login that may read "
    "telemetry, for example `operator`.",
    settings_type=Settings,
    parts=_parts,
)
CLI.app.command(snapshot)
CLI.app.command(drain)
for function, name, text in (
    (
        "services.agent.verbs.cli_lso:LSO",
        "lso",
        "Order an LLM serving operation of one instance.",
    ),
    (
        "services.agent.verbs.cli_check_engine:check_engine",
        "check-engine",
        "Check vLLM on this machine's device: tests, benches, one report (needs a checkout).",
    ),
):
    CLI.app.command(function, name=name, help=text)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return CLI.main(argv)
