"""Operators' commands: from the command line over the broker to an operation, and back."""

import argparse
import asyncio
from collections.abc import AsyncIterator

import pytest

from services.agent.cli import CLI
from services.agent.lso import cli
from services.agent.lso.cli import SUB_VERBS
from services.agent.lso.commands import OPERATIONS
from services.agent.lso.ordering import order
from services.agent.settings import Settings
from shared.broker import topology
from shared.broker.protocol import BindingSpec, PublishOutcome
from shared.contracts.base import InstanceId, ModelName, RequestId
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
from solver.planning.lso.operations import Lso
from tests.brokers import eventually
from tests.queued import OTHER, a_request, lane_of
from tests.unit.agent.rig import AgentRig

pytestmark = pytest.mark.virtual_time

I1, R = InstanceId("i1"), RequestId("r")
LANE, RESUME = lane_of().queue_name, lane_of().resume_name


@pytest.fixture
async def listening(rig: AgentRig) -> AsyncIterator[AgentRig]:
    """Let the agent consume commands."""
    queue = topology.private_queue("agent.test")
    await rig.broker.declare_queue(queue)
    key = topology.command_instance("i1")
    await rig.broker.bind(BindingSpec(exchange=topology.CONTROL, queue=queue.name, routing_key=key))
    subscription = await rig.broker.consume(queue.name, rig.handler.handle, prefetch=8)
    yield rig
    await rig.commands.close()
    await subscription.cancel()


async def ordered(rig: AgentRig, command: LsoCommand) -> LsoAnswered:
    answer = await order(rig.far, command, timeout_s=60.0)
    assert isinstance(answer, LsoAnswered)
    return answer


async def test_command_is_executed_and_answered(listening: AgentRig):
    await listening.running(a_request("r"))

    answer = await ordered(listening, EvictRequest(instance_id=I1, request_id=R))

    assert (answer.outcome, answer.lso, answer.instance_id) == (LsoOutcome.DONE, "evict", "i1")
    assert (await listening.requeued(RESUME)).request_id == "r"


async def test_commands_pull_and_set_limits(listening: AgentRig):
    listening.sources(LANE)
    await listening.put(a_request("r"))

    pulled = await ordered(listening, LsoPull(instance_id=I1))
    limited = await ordered(listening, LsoSet(instance_id=I1, token_budget=8))

    assert (pulled.outcome, len(listening.state.window)) == (LsoOutcome.DONE, 1)
    assert limited.outcome is LsoOutcome.REFUSED
    assert "scheduling" in limited.message


async def test_activate_command_reports_how_long_the_model_stays(listening: AgentRig):
    answer = await ordered(listening, LsoActivate(instance_id=I1, model=OTHER))

    assert (answer.outcome, listening.state.model) == (LsoOutcome.DONE, OTHER)
    assert "until the next plan" in answer.message


async def test_model_that_is_not_served_is_refused(listening: AgentRig):
    answer = await ordered(listening, LsoActivate(instance_id=I1, model=ModelName("gpt-99")))

    assert answer.outcome is LsoOutcome.REFUSED
    assert "gpt-99" in answer.message


async def test_command_for_another_instance_is_refused(listening: AgentRig):
    """An agent refuses a command that names another instance, even if it receives it."""
    queue = topology.temporary_queue("answer")
    await listening.far.declare_queue(queue)
    await listening.far.bind(
        BindingSpec(exchange=topology.REPLIES, queue=queue.name, routing_key=queue.name)
    )
    await listening.deliver(
        EvictRequest(instance_id=InstanceId("i2"), request_id=R, reply_to=queue.name)
    )
    body = b""

    async def answered() -> bool:
        nonlocal body
        delivery = await listening.far.get(queue.name)
        body = delivery.body if delivery is not None else b""
        return bool(body)

    await eventually(answered)
    assert b"'i1', not 'i2'" in body


async def test_repeated_command_gets_the_same_answer(listening: AgentRig):
    """The operation is not repeated, because the request may have returned meanwhile."""
    request = a_request("r")
    await listening.running(request)
    command = EvictRequest(instance_id=I1, request_id=R, command_id="c1")
    await listening.deliver(command)
    await eventually(lambda: not listening.state.runs)
    await listening.far.take(RESUME)
    await listening.running(request)

    await listening.deliver(command)
    await asyncio.sleep(0.05)

    assert set(listening.state.runs) == {R}


async def test_missing_agent_is_reported_at_once(rig: AgentRig):
    command = LsoClear(instance_id=InstanceId("absent"))

    assert await order(rig.far, command, timeout_s=60.0) is PublishOutcome.UNROUTABLE


async def test_result_is_none_if_no_answer_arrives_in_time(listening: AgentRig):
    listening.sources(LANE)
    await listening.commands.close()
    async with listening.executor.exclusive():
        assert await order(listening.far, LsoPull(instance_id=I1), timeout_s=0.05) is None


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
