"""Operators' commands: from the command line over the broker to an operation, and back."""

from types import SimpleNamespace

import pytest

from services.agent.cli import CLI
from services.agent.settings import Settings
from services.agent.verbs import cli_lso as cli
from services.agent.verbs.cli_lso import LSO, order
from shared.broker import topology
from shared.broker.protocol import BindingSpec, PublishOutcome
from shared.contracts.base import Decoder, InstanceId
from shared.contracts.control import (
    EvictRequest,
    LsoActivate,
    LsoAnswered,
    LsoCheckpoint,
    LsoClear,
    LsoCommand,
    LsoOutcome,
    LsoPull,
    LsoRun,
    LsoSet,
    LsoSwapIn,
    LsoSwapOut,
)
from shared.runtime.lifecycle import EXIT_OK, EXIT_USAGE
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


class Sent:
    """Commands that the verbs send, and how they send them."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.commands: list[LsoCommand] = []
        self.as_json = False

    async def ordered(
        self, settings: Settings, command: LsoCommand, *, timeout_s: float, as_json: bool
    ) -> int:
        assert timeout_s == cli.DEFAULT_TIMEOUT_S
        self.settings, self.as_json = settings, as_json
        self.commands.append(command)
        return EXIT_OK


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The commands are recorded instead of being sent."""
    sent = Sent()
    monkeypatch.setattr(cli, "ordered", sent.ordered)
    return sent


def lso(line: str) -> int:
    return CLI.main(["lso", *line.split(), "--set", "instance_id=i1"])


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("pull --count 3", LsoPull(instance_id=I1, count=3)),
        ("evict r", EvictRequest(instance_id=I1, request_id=R)),
        ("swap-out r --rest 2", LsoSwapOut(instance_id=I1, request_id=R, rest_s=2.0)),
        ("swap-in r", LsoSwapIn(instance_id=I1, request_id=R)),
        ("checkpoint r", LsoCheckpoint(instance_id=I1, request_id=R)),
        ("checkpoint --clear", LsoClear(instance_id=I1)),
        ("activate tiny-llama-b", LsoActivate(instance_id=I1, model=OTHER)),
        ("set --max-running 4", LsoSet(instance_id=I1, max_running=4)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_command_line_maps_to_a_command(line: str, command: LsoCommand, sent: Sent):
    assert lso(line) == EXIT_OK
    assert sent.commands == [command]


@pytest.mark.parametrize(
    "line",
    ["", "dance", "evict", "pull --count 0", "swap-out r --rest -1", "set --token-budget 0",
     "evict r r2", "evict r --count 1"],
)  # fmt: skip
def test_invalid_values_are_usage_errors(line: str, capsys: pytest.CaptureFixture[str]):
    assert lso(line) == EXIT_USAGE
    assert "usage: headway-agent lso" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["checkpoint", "checkpoint r --clear"])
def test_a_checkpoint_is_of_one_request_or_all_are_dropped(
    line: str, sent: Sent, capsys: pytest.CaptureFixture[str]
):
    assert lso(line) == EXIT_USAGE
    assert "lso checkpoint: needs either REQUEST or --clear" in capsys.readouterr().err
    assert sent.commands == []


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
    assert lso(line) == EXIT_USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pull --count 1001", "lso pull: message breaks its schema: Expected `int` <= 1000"),
        (f"set --token-budget {2**31}", "lso set: message breaks its schema: Expected `int` <= "),
        (f"set --max-running {10**30}", "lso set: message breaks its schema"),
    ],
)
def test_command_that_violates_the_schema_is_not_sent(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
):
    """An agent would not answer a command that breaks the schema."""
    assert lso(line) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_settings_before_and_after_the_operation_both_apply(sent: Sent):
    assert lso("--set log_level=debug --json evict r") == EXIT_OK
    assert sent.settings is not None
    assert (sent.settings.instance_id, sent.settings.log_level) == ("i1", "debug")
    assert sent.as_json


def test_set_without_a_limit_is_a_usage_error(capsys: pytest.CaptureFixture[str]):
    assert lso("set") == EXIT_USAGE
    assert "--token-budget" in capsys.readouterr().err


def test_every_command_has_an_operation_and_a_verb(sent: Sent):
    arguments = {"set": "--token-budget 1", "warm": OTHER, "activate": OTHER}
    arguments |= {"run": "make-room most=4 text=a=b"}
    arguments |= dict.fromkeys(("checkpoint", "evict", "swap-out", "swap-in"), "r")
    verbs = [name for name in LSO if not name.startswith("-")]
    for verb in verbs:
        assert lso(f"{verb} {arguments.get(verb, '')}") == EXIT_OK
    commands = {type(each) for each in sent.commands} | {LsoClear}

    assert commands == {*OPERATIONS, LsoActivate, LsoRun}
    assert all(isinstance(make(_any(kind)), Lso) for kind, make in OPERATIONS.items())


def test_arguments_of_an_added_operation_are_pairs(sent: Sent, capsys: pytest.CaptureFixture[str]):
    assert lso("run make-room most=4 text=a=b") == EXIT_OK
    assert sent.commands == [
        LsoRun(instance_id=I1, operation="make-room", arguments={"most": "4", "text": "a=b"})
    ]
    assert lso("run make-room most") == EXIT_USAGE
    assert "'most' must have the form NAME=VALUE" in capsys.readouterr().err


def _any(kind: type) -> object:
    return SimpleNamespace(
        count=1, request_id=R, rest_s=0.0, model=OTHER, token_budget=1, max_running=1
    )
