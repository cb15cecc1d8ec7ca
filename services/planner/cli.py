"""`headway-planner`: command line of the planner."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated

from services.planner.settings import Settings
from shared.broker import topology
from shared.broker.listening import listening
from shared.contracts.base import Decoder
from shared.contracts.plans import PlanPublished
from shared.runtime.cli import Service, ServiceCli, broker_factory, print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import LOADED, AsJson

_decode_plan: Decoder[PlanPublished] = Decoder(PlanPublished)


async def show_plan(*, settings: Annotated[Settings, LOADED], json: AsJson = False) -> int:
    """Print each instance's virtual queue, as the leader last published it."""
    plans: dict[str, PlanPublished] = {}

    def on_plan(plan: PlanPublished) -> None:
        plans[plan.queue.instance_id] = plan

    async with broker_factory(settings.amqp_url)("headway-show-plan") as broker:
        queue = topology.temporary_queue("show-plan")
        bindings = [(topology.TELEMETRY, "plan.#")]
        async with listening(broker, queue, _decode_plan, bindings, on_plan):
            await asyncio.sleep(settings.leader.refresh_period_s + 1.0)
    if not plans:
        print("no plan received: is a planner with the leader role running?", file=sys.stderr)
        return EXIT_FAILED
    for _, plan in sorted(plans.items()):
        if json:
            print_data(plan, as_json=True)
        else:
            print(_table(plan))
    return EXIT_OK


def _table(plan: PlanPublished) -> str:
    lines = [f"{plan.queue.instance_id}  epoch {plan.epoch}  by {plan.leader_id}  {plan.policy}"]
    for position, segment in enumerate(plan.queue.segments, start=1):
        lines.append(f"  {position}. {segment.model}")
        lines += [f"       {quota.lane}  x{quota.quota}" for quota in segment.lanes]
    return "\n".join(lines if len(lines) > 1 else [*lines, "  nothing waits"])


def planner(prog: str) -> ServiceCli[Settings]:
    """The command line of the planner, as the program *prog*."""

    def parts() -> Service[Settings]:
        from services.planner import service  # noqa: PLC0415 - `health` needs no solver

        return Service(serve=service.serve, check=service.check)

    cli = ServiceCli(
        service="planner",
        text="Moves requests from the global queues to lanes, and plans which instances serve "
        "them.",
        settings_type=Settings,
        parts=parts,
        prog=prog,
    )
    cli.app.command(show_plan)
    cli.app.command(
        "services.planner.cli_plan:PLAN", name="plan", help="Show, explain or compare plans."
    )
    return cli


CLI = planner("headway-planner")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return CLI.main(argv)
