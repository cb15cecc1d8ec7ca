"""`headway-agent lso`: sends an operator's command to one instance."""

import argparse
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.agent.settings import Settings
from shared.broker import topology
from shared.broker.protocol import Broker, PublishOutcome
from shared.broker.rpc import ask
from shared.contracts.base import Decoder, InstanceId, Message, encode
from shared.contracts.control import (
    EvictRequest,
    LsoActivate,
    LsoAnswered,
    LsoCheckpoint,
    LsoClear,
    LsoCommand,
    LsoOutcome,
    LsoPreempt,
    LsoPull,
    LsoSet,
    LsoSwapIn,
    LsoSwapOut,
    LsoWarm,
)
from shared.contracts.errors import ContractError
from shared.runtime.arguments import (
    HelpFormatter,
    KeepingSettings,
    TextHelpFormatter,
    common_options,
    seconds,
)
from shared.runtime.cli import Verb, broker_factory, print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_USAGE

DEFAULT_TIMEOUT_S = 30.0
_decode: Decoder[LsoAnswered] = Decoder(LsoAnswered)

EPILOG = """examples:
  headway-agent lso evict REQUEST --set instance_id=agent-0
  headway-agent lso swap-out REQUEST --rest 5 --set instance_id=agent-0
  headway-agent lso activate tiny-llama-b --timeout 120 --set instance_id=agent-0
  headway-agent lso set --token-budget 256 --set instance_id=agent-0
  headway-agent lso pull --count 4 --set instance_id=agent-0 --json

Every operation is safe to repeat; if it has already taken effect, the outcome is `already`.
Exit codes: 0 done or already, 1 refused, failed or no answer, 2 usage, 3 broker unreachable.
Effects and costs of each operation: ops/docs/lso.md
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SubVerb:
    """One LLM serving operation as a verb of the command line."""

    name: str
    help: str
    command: Callable[[InstanceId, argparse.Namespace], LsoCommand]
    arguments: Callable[[argparse.ArgumentParser], None] = lambda _parser: None


def _request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST", help="id of the request")


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="base model, as in the registry")


def _pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--count", type=_positive, default=1, metavar="N", help="maximum number of requests to pull"
    )


def _rest(parser: argparse.ArgumentParser) -> None:
    _request(parser)
    parser.add_argument(
        "--rest",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help=(
            "minimum time in seconds before the request resumes without a swap-in; 0: as "
            "soon as there is room"
        ),
    )


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("request_id", metavar="REQUEST", nargs="?", help="id of the request")
    what.add_argument(
        "--clear",
        action="store_true",
        help="drop all KV that no running request needs (prefix cache and checkpoints) instead",
    )


def _limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token-budget", type=_positive, metavar="N", help="maximum tokens of one iteration"
    )
    parser.add_argument(
        "--max-running", type=_positive, metavar="N", help="maximum number of running requests"
    )


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


SUB_VERBS: tuple[_SubVerb, ...] = (
    _SubVerb(
        name="pull",
        help=(
            "pull now, within the bounds that `snapshot` shows, also from queues that seemed empty"
        ),
        command=lambda to, given: LsoPull(instance_id=to, count=given.count),
        arguments=_pull,
    ),
    _SubVerb(
        name="evict",
        help="return a running or swapped-out request to its resume queue with its progress; "
        "any instance can resume it after one prefill",
        command=lambda to, given: EvictRequest(instance_id=to, request_id=given.request_id),
        arguments=_request,
    ),
    _SubVerb(
        name="swap-out",
        help="remove a request from the engine; the instance keeps the request, resumes it when "
        "there is room, and evicts it when its lease ends",
        command=lambda to, given: LsoSwapOut(
            instance_id=to, request_id=given.request_id, rest_s=given.rest
        ),
        arguments=_rest,
    ),
    _SubVerb(
        name="swap-in",
        help="resume a swapped-out request now, ahead of all waiting requests",
        command=lambda to, given: LsoSwapIn(instance_id=to, request_id=given.request_id),
        arguments=_request,
    ),
    _SubVerb(
        name="checkpoint",
        help="copy a request's KV to host memory as the KV grows, from the request's next run on "
        "this instance on",
        command=lambda to, given: (
            LsoClear(instance_id=to)
            if given.clear
            else LsoCheckpoint(instance_id=to, request_id=given.request_id)
        ),
        arguments=_checkpoint,
    ),
    _SubVerb(
        name="warm",
        help="load a model's weights into host memory, so that activating it is fast",
        command=lambda to, given: LsoWarm(instance_id=to, model=given.model),
        arguments=_model,
    ),
    _SubVerb(
        name="activate",
        help="activate a model; the model stays active until the next plan selects another model",
        command=lambda to, given: LsoActivate(instance_id=to, model=given.model),
        arguments=_model,
    ),
    _SubVerb(
        name="preempt",
        help="drop the best-effort part of the running forward pass, between layers",
        command=lambda to, _given: LsoPreempt(instance_id=to),
    ),
    _SubVerb(
        name="set",
        help=(
            "change limits of the running engine without a restart; the changes are lost when the "
            "agent's process ends"
        ),
        command=lambda to, given: LsoSet(
            instance_id=to, token_budget=given.token_budget, max_running=given.max_running
        ),
        arguments=_limits,
    ),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add one sub-command per LLM serving operation to *parser*."""
    parser.epilog = EPILOG
    parser.formatter_class = TextHelpFormatter
    common = common_options(again=True)
    common.add_argument(
        "--timeout",
        type=seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="time limit for the answer; the operation continues after the limit",
    )
    operations = parser.add_subparsers(
        dest="lso", required=True, metavar="OPERATION", action=KeepingSettings
    )
    for sub_verb in SUB_VERBS:
        sub = operations.add_parser(
            sub_verb.name,
            help=sub_verb.help,
            description=sub_verb.help,
            parents=[common],
            formatter_class=HelpFormatter,
        )
        sub_verb.arguments(sub)


async def order(
    broker: Broker, command: LsoCommand, *, timeout_s: float
) -> LsoAnswered | PublishOutcome | None:
    """
    Publish *command* and wait for its answer.

    Returns:
        The answer, None after the timeout, or the publish outcome if no agent receives the command.
    """

    def addressed(reply_to: str) -> Message:
        return msgspec.structs.replace(command, command_id=secrets.token_hex(8), reply_to=reply_to)

    key = topology.command_instance(command.instance_id)
    return await ask(broker, key, addressed, _decode, timeout_s=timeout_s)


async def lso(settings: Settings, given: argparse.Namespace) -> int:
    """Send the command for one LLM serving operation to an instance, and print the result."""
    sub_verb = next(each for each in SUB_VERBS if each.name == given.lso)
    if given.lso == "set" and given.token_budget is None and given.max_running is None:
        print("lso set needs --token-budget or --max-running", file=sys.stderr)
        return EXIT_USAGE
    instance_id = InstanceId(settings.instance_id)
    command = sub_verb.command(instance_id, given)
    try:
        # The command is validated before it is sent: an agent never answers a command that breaks
        # the schema.
        Decoder[LsoCommand](type(command))(encode(command))
    except ContractError as error:
        print(f"lso {given.lso}: {error}", file=sys.stderr)
        return EXIT_USAGE
    async with broker_factory(settings.amqp_url)("headway-lso") as broker:
        answer = await order(broker, command, timeout_s=given.timeout)
    if isinstance(answer, PublishOutcome):
        print(f"no agent with the instance id {instance_id!r} is connected", file=sys.stderr)
        return EXIT_FAILED
    if answer is None:
        print(
            f"instance {instance_id!r} has not answered within {given.timeout:g} s; the "
            "operation may still be in progress",
            file=sys.stderr,
        )
        return EXIT_FAILED
    return _shown(answer, as_json=given.json)


def _shown(answer: LsoAnswered, *, as_json: bool) -> int:
    ok = answer.outcome in (LsoOutcome.DONE, LsoOutcome.ALREADY)
    if as_json:
        print_data(answer, as_json=True)
    else:
        moved = f", {answer.num_bytes} bytes" if answer.num_bytes else ""
        print(
            f"{answer.lso} {answer.outcome.value} in {answer.duration_s:.3f} s{moved}: "
            f"{answer.message}",
            file=sys.stdout if ok else sys.stderr,
        )
    return EXIT_OK if ok else EXIT_FAILED


VERB: Verb[Settings] = Verb(
    name="lso",
    help="order an LLM serving operation: pull, evict, swap-out, swap-in, checkpoint, warm, "
    "activate, preempt, set",
    run=lso,
    arguments=arguments,
)
