"""Arguments and help texts of the verbs of `headway`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from services.mesh.arguments import OF_ONE_REQUEST, begin_time, parser
from services.mesh.cli import main
from shared.contracts.errors import SettingsError

SECRET_URL = "amqp://operator:secret@broker:5672/"
VERBS = ("up", "submit", "top", "queues", "dead-letter")


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Restore logging after each test, because commands configure it for this process."""
    yield
    structlog.reset_defaults()


def help_of(*given: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The output of `headway … --help`, on one line."""
    with pytest.raises(SystemExit) as end:
        main([*given, "--help"])
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "given", [["up"], ["submit"], ["top"], ["queues"], ["dead-letter", "peek"]]
)
def test_verbs_accept_a_broker(given: list[str]):
    options = parser(amqp_url="", registry=None).parse_args([*given, "--amqp-url", SECRET_URL])

    assert options.amqp_url == SECRET_URL


@pytest.mark.parametrize(
    "given",
    [
        ["submit", "--registry", "models.json"],
        ["top", "--registry", "models.json"],
        ["dead-letter", "peek", "--registry", "models.json"],
        ["up", "--json"],
    ],
)
def test_verbs_refuse_arguments_without_effect(
    given: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        main(given)

    assert end.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("argument", OF_ONE_REQUEST)
@pytest.mark.usefixtures("own_logging")
def test_arguments_of_a_single_request_are_refused_with_a_file(
    argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    value = {"--importance": "low", "--on-late": "drop"}.get(argument, "3")
    given = [value] if argument == "prompt" else [argument, value]
    code = main(["submit", "--file", str(tmp_path / "requests.jsonl"), *given])

    assert code == 2
    assert f"{argument} has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--endpoint", "/v1/completions"], "--endpoint and --body need each other"),
        (["--body", "{}", "--model", "m", "hello"], "--endpoint and --body need each other"),
        (["--endpoint", "/v1/completions", "--body", "{}", "hello"], "prompt has no effect"),
        (
            ["--endpoint", "/v1/completions", "--body", "{}", "--max-tokens", "3"],
            "--max-tokens has no effect with --endpoint: set it in --body",
        ),
    ],
)
@pytest.mark.usefixtures("own_logging")
def test_arguments_that_do_not_fit_an_endpoint_are_refused(
    given: list[str], reason: str, capsys: pytest.CaptureFixture[str]
):
    code = main(["submit", *given])

    assert code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_no_password(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_AMQP_URL", SECRET_URL)

    assert "secret" not in help_of(verb, capsys=capsys)


def test_usage_of_the_planners_verb_has_the_name_as_called(capsys: pytest.CaptureFixture[str]):
    assert help_of("plan", capsys=capsys).startswith("usage: headway plan ")
    assert help_of("plan", "show", capsys=capsys).startswith("usage: headway plan show ")


def test_doctor_needs_a_broker_of_its_own_process(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--amqp-url", "memory://"]) == 2
    assert "--amqp-url amqp://" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "time"), [(None, None), ("1700000000.5", 1700000000.5), ("+30", 1030.0)]
)
def test_time_to_begin_is_absolute_or_relative(text: str | None, time: float | None):
    assert begin_time(text, 1000.0) == time


@pytest.mark.parametrize("text", ["soon", "+", "nan", "inf"])
def test_time_to_begin_that_cannot_be_read_is_refused(text: str):
    with pytest.raises(SettingsError, match="--not-before"):
        begin_time(text, 1000.0)


def test_ends_of_a_request_are_arguments():
    options = parser(amqp_url="amqp://x", registry=None).parse_args(
        ["submit", "--ttl", "5", "--on-late", "drop", "--not-before", "+2", "hello"]
    )

    assert (options.ttl, options.on_late, options.not_before) == (5.0, "drop", "+2")
