"""Operators' commands: from the command line over the broker to an operation, and back."""

import argparse

import pytest

from services.agent.cli import CLI
from services.agent.settings import Settings
from services.agent.verbs import cli_lso as cli
from services.agent.verbs.cli_lso import SUB_VERBS, order
from shared.broker import topology
from shared.broker.protocol import BindingSpec, PublishOutcome
from shared.contracts.base import Decoder, InstanceId
from shared.contracts.control import (
    EvictRequest,
    LsoActivate,
    LsoAnswered,
    LsoClear,
    LsoCommand,
    LsoOutcome,
    LsoPull,
    LsoSet,
    LsoSwapIn,
    LsoSwapOut,
)
from solver.instance.operations import OPERATIONS
from solver.planning.lso.operations import Lso
from tests.agents.rig import I1, REPLY, RESUME, AgentRig, R, counted
from tests.queued import OTHER, a_request

pytestmark = pytest.mark.virtual_time

DONE, REFUSED = LsoOutcome.DONE, LsoOutcome.REFUSED
decode: Decoder[LsoAnswered] = Decoder(LsoAnswered)


@pytest.mark.parametrize(
    ("command", "name", "outcome", "message"),
    [
        (EvictRequest(instance_id=I1, request_id=R), "evict", DONE, "1 requeued"),
        (LsoActivate(instance_id=I1, model=OTHER), "activate", DONE, "until the next plan"),
        (LsoSet(instance_id=I1, token_budget=8), "set", REFUSED, "scheduling"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_command_is_executed_and_answered(
    rig: AgentRig, command: LsoCommand, name: str, outcome: LsoOutcome, message: str
):
    await rig.running(a_request("r"))
    answer = await rig.ordered(command)

    assert (answer.outcome, answer.lso, answer.instance_id) == (outcome, name, "i1")
    assert message in answer.message
    if not isinstance(command, LsoActivate):
        assert counted(rig, "lsos_total", kind=name, outcome=outcome.value) == 1


async def answers(rig: AgentRig, command: LsoCommand) -> list[LsoAnswered]:
    """Answers on the reply queue after *command*."""
    await rig.deliver(command)
    found = []
    while (delivery := await rig.far.get(REPLY)) is not None:
        found.append(decode(delivery.body))
    return found


async def test_repeated_command_gets_the_same_answer(rig: AgentRig):
    """The operation is not repeated, because the request may have returned meanwhile."""
    request = a_request("r")
    await rig.running(request)
    command = EvictRequest(instance_id=I1, request_id=R, command_id="c1", reply_to=REPLY)
    (first,) = await answers(rig, command)
    await rig.requeued(RESUME)
    await rig.running(request)
    (second,) = await answers(rig, command)

    assert rig.engine.running == {"r"}
    assert first.outcome is DONE
    assert (second.command_id, second.outcome) == ("c1", first.outcome)
    assert second.message == first.message


async def test_missing_agent_is_reported_at_once(rig: AgentRig):
    command = LsoClear(instance_id=InstanceId("absent"))

    assert await order(rig.far, command, timeout_s=60.0) is PublishOutcome.UNROUTABLE


async def test_result_is_none_if_no_answer_arrives_in_time(rig: AgentRig):
    queue = topology.private_queue("agent.silent")
    await rig.far.declare_queue(queue)
    key = topology.command_instance("silent")
    await rig.far.bind(BindingSpec(exchange=topology.CONTROL, queue=queue.name, routing_key=key))

    assert await order(rig.far, LsoPull(instance_id=InstanceId("silent")), timeout_s=0.05) is None


def parsed(*arguments: str) -> argparse.Namespace:
    return CLI._parser().parse_args(["lso", *arguments])


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("pull --count 3", LsoPull(instance_id=I1, count=3)),
        ("evict r", EvictRequest(instance_id=I1, request_id=R)),
        ("swap-out r --rest 2", LsoSwapOut(instance_id=I1, request_id=R, rest_s=2.0)),
        ("swap-in r", LsoSwapIn(instance_id=I1, request_id=R)),
        ("checkpoint --clear", LsoClear(instance_id=I1)),
        ("activate tiny-llama-b", LsoActivate(instance_id=I1, model=OTHER)),
        ("set --max-running 4", LsoSet(instance_id=I1, max_running=4)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_command_line_maps_to_a_command(line: str, command: LsoCommand):
    given = parsed(*line.split())
    sub_verb = next(each for each in SUB_VERBS if each.name == given.lso)

    assert sub_verb.command(I1, given) == command


@pytest.mark.parametrize(
    "line",
    ["", "dance", "evict", "pull --count 0", "checkpoint", "checkpoint r --clear",
     "swap-out r --rest -1", "set --token-budget 0"],
)  # fmt: skip
def test_invalid_values_are_usage_errors(line: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exited:
        parsed(*line.split())

    assert exited.value.code == 2
    assert "usage: headway-agent lso" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pull --count many", "--count: 'many' is not an integer"),
        ("pull --count -2", "--count: -2 is below 1"),
        ("set --max-running 1.5", "--max-running: '1.5' is not an integer"),
        ("swap-out r --rest soon", "--rest: 'soon' is not a number of seconds"),
        ("swap-out r --rest nan", "--rest: nan is not a duration"),
        ("warm m --timeout inf", "--timeout: inf is not a duration"),
    ],
)
def test_usage_error_names_the_wrong_value(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        parsed(*line.split())

    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pull --count 1001", "lso pull: message breaks its schema: Expected `int` <= 1000"),
        (f"set --token-budget {2**31}", "lso set: message breaks its schema: Expected `int` <= "),
        (f"set --max-running {10**30}", "lso set: message breaks its schema"),
    ],
)
async def test_command_that_violates_the_schema_is_not_sent(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
):
    """An agent would not answer a command that breaks the schema."""
    assert await cli.lso(Settings(instance_id="i1", registry="unused"), parsed(*line.split())) == 2
    assert message in capsys.readouterr().err


def test_settings_before_and_after_the_operation_both_apply():
    given = parsed("--set", "instance_id=i1", "evict", "r", "--set", "log_level=info", "--json")

    assert (given.set, given.json) == (["instance_id=i1", "log_level=info"], True)


async def test_set_without_a_limit_is_a_usage_error(capsys: pytest.CaptureFixture[str]):
    assert await cli.lso(Settings(instance_id="i1", registry="unused"), parsed("set")) == 2
    assert "--token-budget" in capsys.readouterr().err


def test_every_command_has_an_operation_and_a_verb():
    given = argparse.Namespace(
        count=1, request_id=R, rest=0.0, clear=False, model=OTHER, token_budget=1, max_running=None
    )
    commands = {type(each.command(I1, given)) for each in SUB_VERBS} | {LsoClear}

    assert commands == {*OPERATIONS, LsoActivate}
    assert all(isinstance(make(_any(kind)), Lso) for kind, make in OPERATIONS.items())
    assert all(f"lso {name}" in cli.EPILOG for name in ("evict", "swap-out", "activate", "set"))


def _any(kind: type) -> object:
    return argparse.Namespace(
        count=1, request_id=R, rest_s=0.0, model=OTHER, token_budget=1, max_running=1
    )
