"""Arguments and help texts of the verbs of `headway`."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from ops.ports import free_port
from services.mesh.cli import MeshProgram, main
from services.mesh.mesh import stop_signals
from services.mesh.spec import EMBEDDED_SEEN
from services.mesh.verbs.cli_submit import SubmitOptions, begin_time
from shared.contracts.errors import SettingsError
from shared.contracts.qos import OnLate
from shared.runtime.lifecycle import EXIT_NO_BROKER

SECRET_URL = "amqp://operator:secret@broker:5672/"
VERBS = ("up", "submit", "top", "queues", "dead-letter")


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Restore logging after each test, because commands configure it for this process."""
    yield
    structlog.reset_defaults()


def help_of(*given: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The output of `headway … --help`, on one line."""
    assert main([*given, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "given", [["up"], ["submit"], ["top"], ["queues"], ["dead-letter", "peek"]]
)
def test_verbs_accept_a_broker(given: list[str]):
    _, bound, _ = MeshProgram().parsed([*given, "--amqp-url", SECRET_URL])

    assert bound.arguments["amqp_url"] == SECRET_URL


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
    assert main(given) == 2
    assert f"Unknown option: {given[-2] if given[-1] == 'models.json' else given[-1]}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["up", "--data-dir", ""], "headway up: --data-dir is empty"),
        (["up", "--log-dir="], "headway up: --log-dir is empty"),
        (["up", "--registry", " "], "headway up: --registry is empty"),
        (["store", "status", "--data-dir", ""], "headway store status: --data-dir is empty"),
        (["keys", "list", "--file", ""], "headway keys list: --file is empty"),
        (["top", "--amqp-url", ""], "headway top: --amqp-url is empty"),
        (["submit", "--max-tokens", "1.5"], "--max-tokens: '1.5' is not an integer"),
        (["top", "--amqp-url", "amqp://[::1/"], "the broker's URL cannot be read"),
        (["doctor", "--amqp-url", "amqp://[::1/"], "the broker's URL cannot be read"),
        (["submit", "--amqp-url", "amqp://[::1/", "--model", "m", "a"], "cannot be read"),
        (["batch", "list", "--url", "http://[::1/"], "--url is 'http://[::1/'"),
        (["up", "--attach", "kubernetes://[::1/x", "--broker", "embedded"], "Invalid IPv6 URL"),
    ],
)
@pytest.mark.usefixtures("own_logging")
def test_unusable_values_are_usage_errors(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(given) == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("own_logging")
def test_an_empty_variable_of_the_broker_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HEADWAY_AMQP_URL", "")

    assert main(["top", "--once"]) == 2
    assert "HEADWAY_AMQP_URL is empty" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["prompt", *SubmitOptions().of_one_request])
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


def test_help_of_a_verb_has_more_than_its_line_in_the_list(capsys: pytest.CaptureFixture[str]):
    assert "HEADWAY_API_KEY" in help_of("demo", capsys=capsys)
    assert "HEADWAY_API_KEY" not in help_of(capsys=capsys)


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_no_password(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_AMQP_URL", SECRET_URL)

    assert "secret" not in help_of(verb, capsys=capsys)


@pytest.mark.parametrize(
    ("given", "code"),
    [(["--help"], 0), (["up", "--help"], 0), (["top", "--help"], 0), (["tpo"], 2), (["--vers"], 2)],
)
def test_help_and_unknown_verbs_import_no_service_and_no_large_package(given: list[str], code: int):
    program = (
        "import sys\n"
        "from services.mesh.cli import main\n"
        f"code = main({given})\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & set(sys.argv[1:])))\n"
        "print(*(name for name in sys.modules if name.endswith('.service')))\n"
        f"sys.exit(code != {code})"
    )
    large = ("ortools", "numba", "numpy", "sqlalchemy", "torch", "transformers")
    ran = subprocess.run(
        [sys.executable, "-c", program, *large], check=True, capture_output=True, text=True
    )

    assert ran.stdout.splitlines()[-2:] == ["", ""]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["subm"], "headway: there is no verb 'subm': did you mean 'submit'?"),
        (["keys", "creat"], "headway keys: there is no verb 'creat': did you mean 'create'?"),
        (["plan", "shwo"], "headway plan: there is no verb 'shwo': did you mean 'show'?"),
        (["verison"], "headway: there is no verb 'verison': did you mean 'version'?"),
        (["--verison"], "headway: Unknown option: --verison. Did you mean --version?"),
        (["--vers"], "headway: Unknown option: --vers. Did you mean --version?"),
        (["-V"], "headway: Unknown option: -V. Did you mean --version?"),
        (["--nosuch=1"], "headway: Unknown option: --nosuch.\n"),
        (["keys", "--hlp"], "headway keys: Unknown option: --hlp. Did you mean --help?"),
        (["submit", "--hlp"], "headway submit: Unknown option: --hlp. Did you mean --help?"),
        (["up", "--prot", "3"], "headway up: Unknown option: --prot. Did you mean --port?"),
        (["plan", "show", "--confg", "x"], "headway plan show: Unknown option: --confg. Did you"),
        (["nosuch"], "headway: there is no verb 'nosuch': it must be one of: up, submit,"),
    ],
)
@pytest.mark.usefixtures("own_logging")
def test_an_unknown_verb_is_answered_with_the_nearest_one_or_all(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    code = main(given)

    assert code == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(("verb", "hinted"), [("top", True), ("up", False)])
@pytest.mark.usefixtures("own_logging")
def test_without_a_broker_verbs_say_where_an_embedded_mesh_is_seen(
    verb: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    hinted: bool,
):
    monkeypatch.chdir(tmp_path)

    assert main([verb, "--amqp-url", f"amqp://127.0.0.1:{free_port()}/"]) == EXIT_NO_BROKER
    assert (EMBEDDED_SEEN in capsys.readouterr().err) is hinted


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


def test_the_gateway_of_up_needs_a_port(capsys: pytest.CaptureFixture[str]):
    assert main(["up", "--port", "0"]) == 2
    assert "--port: 0 is below 1" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "ends"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_the_end_of_a_terminal_ends_up_unless_nohup_ignores_it(
    given: signal.Handlers, *, ends: bool
):
    before = signal.signal(signal.SIGHUP, given)
    try:
        assert (signal.SIGHUP in stop_signals()) is ends
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ends_of_a_request_are_arguments():
    _, bound, _ = MeshProgram().parsed(
        ["submit", "--ttl", "5", "--on-late", "drop", "--not-before", "+2", "hello"]
    )

    assert bound.args == ("hello",)
    assert bound.arguments["options"] == SubmitOptions(
        ttl=5.0, on_late=OnLate.DROP, not_before="+2"
    )
