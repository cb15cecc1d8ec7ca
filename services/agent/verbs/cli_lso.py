"""`headway-agent lso`: sends an operator's command to one instance."""

import secrets
import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter

from services.agent.settings import Settings
from shared.broker import topology
from shared.broker.protocol import Broker, PublishOutcome
from shared.broker.rpc import ask
from shared.contracts.base import Decoder, InstanceId, Message, ModelName, RequestId, encode
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
    LsoRun,
    LsoSet,
    LsoSwapIn,
    LsoSwapOut,
    LsoWarm,
)
from shared.contracts.errors import ContractError, SettingsError
from shared.runtime.cli import broker_factory, print_data
from shared.runtime.lifecycle import EXIT_FAILED, EXIT_OK
from shared.runtime.options import LOADED, AsJson, Positive, SecondsOption, read_by
from shared.runtime.program import commands

DEFAULT_TIMEOUT_S = 30.0
_decode: Decoder[LsoAnswered] = Decoder(LsoAnswered)

LSO = commands(
    "lso",
    "Order an LLM serving operation of one instance.",
    examples="""\
examples:
  headway-agent lso evict REQUEST --set instance_id=agent-0
  headway-agent lso swap-out REQUEST --rest 5 --set instance_id=agent-0
  headway-agent lso activate MODEL --timeout 120 --set instance_id=agent-0
  headway-agent lso set --token-budget 256 --set instance_id=agent-0
  headway-agent lso pull --count 4 --set instance_id=agent-0 --json
  headway-agent lso run OPERATION most=4 --set instance_id=agent-0

Every operation is safe to repeat; if it has already taken effect, the outcome
is `already`. Exit codes: 0 done or already, 1 refused, failed or no answer,
2 usage, 3 broker unreachable.
Effects and costs of each operation: ops/docs/lso.md""",
)
Loaded = Annotated[Settings, LOADED]
Timeout = Annotated[
    SecondsOption,
    Parameter(
        name="--timeout",
        help="Time limit for the answer; the operation continues after the limit.",
    ),
]
Request = Annotated[RequestId, Parameter(name="request", help="Id of the request.")]
Model = Annotated[ModelName, Parameter(name="model", help="Base model, as in the registry.")]


@LSO.command
async def pull(
    *,
    settings: Loaded,
    count: Positive = 1,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    json: AsJson = False,
) -> int:
    """
    Pull now, within the bounds that `snapshot` shows, also from queues that seemed empty.

    Args:
        count: Maximum number of requests to pull.
    """
    command = LsoPull(instance_id=_instance(settings), count=count)
    return await ordered(settings, command, timeout_s=timeout_s, as_json=json)


@LSO.command
async def evict(
    request: Request,
    /,
    *,
    settings: Loaded,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    json: AsJson = False,
) -> int:
    """
    Return a running or swapped-out request to its resume queue with its progress; any instance
    can resume it after one prefill.
    """
    command = EvictRequest(instance_id=_instance(settings), request_id=request)
    return await ordered(settings, command, timeout_s=timeout_s, as_json=json)


@LSO.command
async def swap_out(
    request: Request,
    /,
    *,
    settings: Loaded,
    rest: SecondsOption = 0.0,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    json: AsJson = False,
) -> int:
    """
    Remove a request from the engine; the instance keeps the request, resumes it when there is
    room, and evicts it when its lease ends.

    Args:
        rest: Minimum time in seconds before the request resumes without a swap-in; 0: as soon as
            there is room.
    """
    command = LsoSwapOut(instance_id=_instance(settings), request_id=request, rest_s=rest)
    return await ordered(settings, command, timeout_s=timeout_s, as_json=json)


@LSO.command
async def swap_in(
    request: Request,
    /,
    *,
    settings: Loaded,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    json: AsJson = False,
) -> int:
    """Resume a swapped-out request now, ahead of all waiting requests."""
    command = LsoSwapIn(instance_id=_instance(settings), request_id=request)
    return await ordered(settings, command, timeout_s=timeout_s, as_json=json)


@LSO.command
async def checkpoint(
    request: Request | None = None,
    /,
    *,
    settings: Loaded,
    clear: bool = False,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    json: AsJson = False,
) -> int:
    """
    Copy a request's KV to host memory as the KV grows, from the request's next run on this
    instance on.

    Args:
        clear: Drop all KV that no running request needs (prefix cache and checkpoints) instead.

    Raises:
        SettingsError: Neither a request nor `--clear` is given, or both are.
    """
    if (request is None) is not clear:
        raise SettingsError("needs either REQUEST or --clear")
    instance_id = _instance(settings)
    command = (
        LsoClear(instance_id=instance_id)
        if request is None
        else LsoCheckpoint(instance_id=instance_id, request_id=request)
    )
    return await ordered(settings, command, timeout_s=timeout_s, as_json=json)


@LSO.command
async def warm(
    model: Model,
    /,
    *,
    settings: Loaded,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    json: AsJson = False,
) -> int:
    """Load a model's weights into host memory, so that activating it is fast."""
    command = LsoWarm(instance_id=_instance(settings), model=model)
    return await ordered(settings, command, timeout_s=timeout_s, as_json=json)


@LSO.command
async def activate(
    model: Model,
    /,
    *,
    settings: Loaded,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    json: AsJson = False,
) -> int:
    """Activate a model; the model stays active until the next plan selects another model."""
    command = LsoActivate(instance_id=_instance(settings), model=model)
    return await ordered(settings, command, timeout_s=timeout_s, as_json=json)


@LSO.command
async def preempt(
    *,
    settings: Loaded,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    json: AsJson = False,
) -> int:
    """Drop the best-effort part of the running forward pass, between layers."""
    command = LsoPreempt(instance_id=_instance(settings))
    return await ordered(settings, command, timeout_s=timeout_s, as_json=json)


@LSO.command(name="set")
async def change(
    *,
    settings: Loaded,
    token_budget: Positive | None = None,
    max_running: Positive | None = None,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    json: AsJson = False,
) -> int:
    """
    Change limits of the running engine without a restart; the changes are lost when the agent's
    process ends.

    Args:
        token_budget: Maximum tokens of one iteration.
        max_running: Maximum number of running requests.

    Raises:
        SettingsError: No limit is given.
    """
    if token_budget is None and max_running is None:
        raise SettingsError("needs --token-budget or --max-running")
    command = LsoSet(
        instance_id=_instance(settings), token_budget=token_budget, max_running=max_running
    )
    return await ordered(settings, command, timeout_s=timeout_s, as_json=json)


def _pair(text: str) -> str:
    name, separator, _ = text.partition("=")
    if not (name and separator):
        raise ValueError(f"{text!r} must have the form NAME=VALUE")
    return text


@LSO.command
async def run(
    operation: Annotated[str, Parameter(help="Name of the operation's entry point.")],
    /,
    *arguments: Annotated[
        str, read_by(_pair, metavar="NAME=VALUE", help="Arguments of the operation.")
    ],
    settings: Loaded,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    json: AsJson = False,
) -> int:
    """Execute an operation that a package of the agent adds."""
    pairs = (each.partition("=") for each in arguments)
    command = LsoRun(
        instance_id=_instance(settings),
        operation=operation,
        arguments={name: value for name, _, value in pairs},
    )
    return await ordered(settings, command, timeout_s=timeout_s, as_json=json)


def _instance(settings: Settings) -> InstanceId:
    return InstanceId(settings.instance_id)


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


async def ordered(
    settings: Settings, command: LsoCommand, *, timeout_s: float, as_json: bool
) -> int:
    """
    Send *command* to its instance, and print the result.

    Raises:
        SettingsError: The command breaks its schema.
    """
    try:
        # The command is validated before it is sent: an agent never answers a command that breaks
        # the schema.
        Decoder[LsoCommand](type(command))(encode(command))
    except ContractError as error:
        raise SettingsError(str(error)) from error
    async with broker_factory(settings.amqp_url)("headway-lso") as broker:
        answer = await order(broker, command, timeout_s=timeout_s)
    instance_id = command.instance_id
    if isinstance(answer, PublishOutcome):
        print(f"no agent with the instance id {instance_id!r} is connected", file=sys.stderr)
        return EXIT_FAILED
    if answer is None:
        print(
            f"instance {instance_id!r} has not answered within {timeout_s:g} s; the "
            "operation may still be in progress",
            file=sys.stderr,
        )
        return EXIT_FAILED
    return _shown(answer, as_json=as_json)


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
