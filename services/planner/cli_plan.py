"""`headway-planner plan`: shows and explains the leader's plans, and compares two of them."""

import argparse
import asyncio
import sys
from collections.abc import Callable

from services.planner import plan_views
from services.planner.settings import Settings
from shared.broker import topology
from shared.broker.protocol import Broker
from shared.broker.rpc import ask
from shared.contracts.base import Decoder
from shared.contracts.plans import PlanExplained, PlanRequested
from shared.runtime.arguments import (
    HelpFormatter,
    KeepingSettings,
    TextHelpFormatter,
    common_options,
    seconds,
)
from shared.runtime.cli import Verb, broker_factory, print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK

DEFAULT_TIMEOUT_S = 15.0
CHECK_PERIOD_S = 1.0
NO_ANSWER = (
    "no answer: is a planner with the leader role running, and has it received a status "
    "of an instance yet? A new leader collects statuses for a moment before it plans; use "
    "a longer --timeout."
)
EPILOG = """examples:
  headway-planner plan show                 each virtual queue, head first
  headway-planner plan show --gantt         when each lane is served, as a picture
  headway-planner plan explain --groups 5   groups likeliest to be late, cost of other places,
                                            and which operations follow on their instances
  headway-planner plan diff --timeout 60    wait for the next epoch, and print what moved
Exit codes: 0 done, 1 no answer or no change in time, 2 usage, 3 broker unreachable.
"""

_decode: Decoder[PlanExplained] = Decoder(PlanExplained)
_View = Callable[[PlanExplained], str]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = TextHelpFormatter
    parser.epilog = EPILOG
    common = common_options(again=True)
    common.add_argument(
        "--timeout",
        type=seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="time to wait for the answer",
    )
    verbs = parser.add_subparsers(
        dest="plan_verb", required=True, metavar="VERB", action=KeepingSettings
    )

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(
            name, help=text, description=text, parents=[common], formatter_class=HelpFormatter
        )

    show = verb("show", "each instance's groups in order")
    show.add_argument("--gantt", action="store_true", help="print a chart over time")
    explain = verb(
        "explain", ("reasons for the positions of groups, and the operations that follow")
    )
    explain.add_argument(
        "--groups",
        type=_count,
        default=10,
        metavar="N",
        help="number of groups, most likely late first; at most 64",
    )
    verb("diff", "changes of the next epoch")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:  # noqa: PLR2004 - the message's own bound
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 64, not {text!r}")
    return int(text)


async def _plan(settings: Settings, arguments: argparse.Namespace) -> int:
    async with broker_factory(settings.amqp_url)("headway-plan") as broker:
        match arguments.plan_verb:
            case "show":
                view = plan_views.gantt if arguments.gantt else plan_views.queues
                return await _print_answer(broker, arguments, view, others=0)
            case "explain":
                return await _print_answer(
                    broker, arguments, plan_views.reasons, others=arguments.groups
                )
            case _:
                return await _diff(broker, arguments)


async def _print_answer(
    broker: Broker, arguments: argparse.Namespace, view: _View, *, others: int
) -> int:
    plan = await _asked(broker, others=others, timeout_s=arguments.timeout)
    if plan is None:
        print(NO_ANSWER, file=sys.stderr)
        return EXIT_FAILED
    if others:
        plan = plan_views.first(plan, others)
    if arguments.json:
        print_data(plan, as_json=True)
    else:
        print(view(plan))
    return EXIT_OK


async def _diff(broker: Broker, arguments: argparse.Namespace) -> int:
    before = await _asked(broker, others=0, timeout_s=arguments.timeout)
    if before is None:
        print(NO_ANSWER, file=sys.stderr)
        return EXIT_FAILED
    try:
        async with asyncio.timeout(arguments.timeout):
            while True:
                after = await _asked(broker, others=0, timeout_s=arguments.timeout)
                if after is not None and after.epoch != before.epoch:
                    break
                await asyncio.sleep(CHECK_PERIOD_S)
    except TimeoutError:
        print(
            f"still epoch {before.epoch} after {arguments.timeout:g} s; use a longer --timeout",
            file=sys.stderr,
        )
        return EXIT_FAILED
    if arguments.json:
        print_data({"before": before, "after": after}, as_json=True)
    else:
        print(plan_views.difference(before, after))
    return EXIT_OK


async def _asked(broker: Broker, *, others: int, timeout_s: float) -> PlanExplained | None:
    answer = await ask(
        broker,
        topology.CONTROL_PLAN,
        lambda reply_to: PlanRequested(reply_to=reply_to, others=others),
        _decode,
        timeout_s=timeout_s,
    )
    return answer if isinstance(answer, PlanExplained) else None


PLAN: Verb[Settings] = Verb(
    name="plan",
    help="show, explain or compare plans",
    run=_plan,
    arguments=_arguments,
)
