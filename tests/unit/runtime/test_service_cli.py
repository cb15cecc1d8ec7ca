"""The command line shared by all services."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog

from ops.ports import free_port
from services.agent.cli import main as agent
from services.estimator.cli import main as estimator
from services.planner.cli import main as planner
from shared.broker import topology
from shared.models.tiny import make_tiny_models


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def absent() -> str:
    """A broker URL without a listener."""
    return f"amqp://127.0.0.1:{free_port()}/"


@pytest.mark.parametrize("main", [planner, estimator, agent])
def test_check_config_prints_the_effective_settings(main, capsys: pytest.CaptureFixture[str]):
    argv = ["check-config", "--json", "--set", "amqp_url=amqp://me:secret@there/"]
    assert main([*argv, *(["--set", "instance_id=i1"] if main is agent else [])]) == 0
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert shown["amqp_url"] == "amqp://***@there/"
    assert shown["drain_timeout_s"] == 20.0


def test_settings_come_from_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "planner.json"
    file.write_bytes(b'{"registry": "from-file", "log_level": "debug"}')
    monkeypatch.setenv("HEADWAY_PLANNER_REGISTRY", "from-environment")
    assert planner(["check-config", "--json", "--config", str(file)]) == 0
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert (shown["registry"], shown["log_level"]) == ("from-environment", "debug")


@pytest.mark.parametrize(
    ("main", "argv", "says"),
    [
        (planner, ["check-config", "--set", "nonsense=1"], "nonsense"),
        (planner, ["check-config", "--set", "nonsense"], "FIELD=VALUE"),
        (planner, ["check-config", "--set", "leader.policy=magic"], "edf-batching"),
        (planner, ["run", "--set", "leader.policy=magic"], "edf-batching"),
        (agent, ["check-config"], "instance_id"),
        (agent, ["check-config", "--set", "instance_id=a b"], "instance_id"),
        (
            agent,
            ["check-config", "--set", "instance_id=a", "--set", "engine.backend=magic"],
            "simulated",
        ),
        (planner, ["check-config", "--set", "tenants=absent.json"], "absent.json"),
        (planner, ["health"], "health_port"),
        (planner, ["show-plan", "--set", "amqp_url=http://x/"], "amqp://"),
    ],
)
def test_impossible_settings_end_with_2_and_a_reason(
    main, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert main(argv) == 2
    assert says in capsys.readouterr().err


def test_an_unknown_verb_ends_with_2(capsys: pytest.CaptureFixture[str]):
    assert planner(["dance"]) == 2
    assert "show-plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["run", "--sett", "a=b"], "--sett. Did you mean --set?"),
        (["run", "--confg", "x"], "--confg. Did you mean --config?"),
        (["check-config", "--jsn"], "--jsn. Did you mean --json?"),
        (["plan", "show", "--gant"], "--gant. Did you mean --gantt?"),
        (["--verison"], "--verison. Did you mean --version?"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest_one(
    argv: list[str], meant: str, capsys: pytest.CaptureFixture[str]
):
    assert planner(argv) == 2
    assert f"Unknown option: {meant}\n" in capsys.readouterr().err


def test_health_of_a_stopped_service_ends_with_1(
    capsys: pytest.CaptureFixture[str],
):
    assert planner(["health", "--json", "--set", f"health_port={free_port()}"]) == 1
    assert msgspec.json.decode(capsys.readouterr().out)["ready"] is False


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (planner, ["show-plan"]),
        (planner, ["plan", "show"]),
        (planner, ["plan", "--set", "log_level=debug", "explain", "--set", "leader.settle_s=1"]),
        (estimator, ["show"]),
        (agent, ["snapshot", "--set", "instance_id=i1"]),
        (agent, ["drain", "--set", "instance_id=i1"]),
    ],
)
def test_without_a_broker_a_command_ends_with_3(
    main, argv: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main([*argv, "--set", f"amqp_url={absent()}"]) == 3
    assert "broker" in capsys.readouterr().err


def test_without_a_broker_a_service_ends_with_3(tmp_path: Path):
    registry = make_tiny_models(tmp_path, weights=False)
    argv = ["run", "--set", f"amqp_url={absent()}", "--set", f"registry={registry}"]
    assert planner(argv) == 3


def test_without_a_registry_a_service_ends_with_2(tmp_path: Path):
    assert planner(["run", "--set", f"registry={tmp_path / 'absent.json'}"]) == 2


def test_topology_prints_the_whole_table(capsys: pytest.CaptureFixture[str]):
    assert planner(["topology", "--json"]) == 0
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert [exchange["name"] for exchange in shown["exchanges"]] == [
        exchange.name for exchange in topology.EXCHANGES
    ]
    every = (*topology.QUEUES, *topology.DELAY_QUEUES)
    assert [queue["name"] for queue in shown["queues"]] == [queue.name for queue in every]
    assert len(shown["bindings"]) == len(topology.BINDINGS) + len(topology.DELAY_BINDINGS)


def test_every_verb_has_a_help_text(capsys: pytest.CaptureFixture[str]):
    assert agent(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in ("run", "check-config", "health", "topology", "snapshot", "drain"):
        assert verb in text
