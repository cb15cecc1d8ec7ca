"""`headway-planner plan`: shows and explains the leader's plans, and compares two of them."""

import asyncio
import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from services.planner import plan_views
from services.planner.settings import Settings
from shared.broker import topology
from shared.broker.protocol import Broker
from shared.broker.rpc import ask
from shared.contracts.base import Decoder, Seconds
from shared.contracts.plans import PlanExplained, PlanRequested
from shared.runtime.cli import broker_factory, print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import LOADED, AsJson, SecondsOption, whole
from shared.runtime.program import commands

DEFAULT_TIMEOUT_S = 15.0
CHECK_PERIOD_S = 1.0
NO_ANSWER = (
    "no answer: is a planner with the leader role running, and has it received a status "
    "of an instance yet? A new leader collects statuses for a moment before it plans; use "
    "a longer --timeout."
)

_decode: Decoder[PlanExplained] = Decoder(PlanExplained)
PLAN = commands(
    "plan",
    "Show, explain or compare plans.",
    examples="""\
examples:
  headway-planner plan show                each virtual queue, head first
  headway-planner plan show --gantt        when each lane is served, as a chart
  headway-planner plan explain --groups 5  groups likeliest to be late, cost of
                                           other places, and the operations
                                           that follow on their instances
  headway-planner plan diff --timeout 60   wait for the next epoch, and print
                                           what moved
Exit codes: 0 done, 1 no answer or no change in time, 2 usage,
3 broker unreachable.""",
)
_View = Callable[[PlanExplained], str]
Loaded = Annotated[Settings, LOADED]
Timeout = Annotated[SecondsOption, Parameter(name="--timeout", help="Time to wait for the answer.")]


@PLAN.command
async def show(
    *,
    settings: Loaded,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    gantt: bool = False,
    json: AsJson = False,
) -> int:
    """
    Print each instance's groups in order.

    Args:
        gantt: Print a chart over time.
    """
    columns = shutil.get_terminal_size().columns
    view = partial(plan_views.gantt, columns=columns) if gantt else plan_views.queues
    async with broker_factory(settings.amqp_url)("headway-plan") as broker:
        plan = await _asked(broker, others=0, timeout_s=timeout_s)
    return _printed(plan, view, as_json=json)


@PLAN.command
async def explain(
    *,
    settings: Loaded,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    groups: Annotated[int, whole(least=1, most=64)] = 10,
    json: AsJson = False,
) -> int:
    """
    Print reasons for the positions of groups, and the operations that follow.

    Args:
        groups: Number of groups, most likely late first; at most 64.
    """
    async with broker_factory(settings.amqp_url)("headway-plan") as broker:
        plan = await _asked(broker, others=groups, timeout_s=timeout_s)
    if plan is not None:
        plan = plan_views.first(plan, groups)
    return _printed(plan, plan_views.reasons, as_json=json)


def _printed(plan: PlanExplained | None, view: _View, *, as_json: bool) -> int:
    if plan is None:
        print(NO_ANSWER, file=sys.stderr)
        return EXIT_FAILED
    if as_json:
        print_data(plan, as_json=True)
    else:
        print(view(plan))
    return EXIT_OK


@PLAN.command
async def diff(
    *, settings: Loaded, timeout_s: Timeout = DEFAULT_TIMEOUT_S, json: AsJson = False
) -> int:
    """Print the changes of the next epoch."""
    async with broker_factory(settings.amqp_url)("headway-plan") as broker:
        return await _diff(broker, timeout_s=timeout_s, as_json=json)


async def _diff(broker: Broker, *, timeout_s: Seconds, as_json: bool) -> int:
    before = await _asked(broker, others=0, timeout_s=timeout_s)
    if before is None:
        print(NO_ANSWER, file=sys.stderr)
        return EXIT_FAILED
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                after = await _asked(broker, others=0, timeout_s=timeout_s)
                if after is not None and after.epoch != before.epoch:
                    break
                await asyncio.sleep(CHECK_PERIOD_S)
    except TimeoutError:
        print(
            f"still epoch {before.epoch} after {timeout_s:g} s; use a longer --timeout",
            file=sys.stderr,
        )
        return EXIT_FAILED
    if as_json:
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
