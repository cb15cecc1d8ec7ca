"""`headway simulate`, as users start it."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.mesh import cli
from services.mesh.cli import main

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", [("services.mesh", "simulate"), ("ops.sim",)])
def test_tiny_run_gives_figures_as_json(command: tuple[str, ...]):
    arguments = ("--qps", "2", "--hours", "0.01", "--dispatch", "pull", "--json")
    done = subprocess.run(
        [sys.executable, "-m", *command, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    figures = msgspec.json.decode(done.stdout)

    assert done.returncode == 0
    assert (figures["dispatch"], figures["window"]) == ("pull", 16)
    assert figures["requests"] > 0


@pytest.mark.parametrize(
    ("row", "printed"),
    [
        ("2023-11-16 18:15:47,many,44\n", "ContextTokens: 'many'"),
        ("2023-11-16 18:15:47,374,\n", "GeneratedTokens: ''"),
        ("yesterday,374,44\n", "TIMESTAMP: 'yesterday'"),
    ],
)
def test_invalid_row_is_reported_by_file_line_and_field(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], row: str, printed: str
):
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADER + ROW + row)
    code = main(["simulate", "--trace", str(trace), "--trace-times"])

    assert code == 2
    assert f"{trace}:3: {printed}" in capfd.readouterr().err


def test_invalid_option_is_a_usage_error(capfd: pytest.CaptureFixture[str]):
    code = main(["simulate", "--wave", "5:-1"])
    printed = capfd.readouterr().err

    assert code == 2
    assert "Invalid value for --wave: '5:-1' is not LOW:HIGH" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("option", ["--qps", "--help"])
def test_missing_checkout_error_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
):
    monkeypatch.setitem(cli.CHECKOUT_VERBS, "simulate", ("ops_of_no_checkout.sim:SIMULATE", ""))

    assert main(["simulate", option]) == 2
    assert "part of a checkout" in capsys.readouterr().err


def test_without_a_checkout_its_verbs_are_completed_without_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert main(["completion", "bash"]) == 0
    assert {"simulate", "--find-replicas", "--chunks"} <= words(capsys)
    for name in cli.CHECKOUT_VERBS:
        monkeypatch.setitem(cli.CHECKOUT_VERBS, name, ("ops_of_no_checkout:VERB", ""))

    assert main(["completion", "bash"]) == 0
    found = words(capsys)
    assert {"simulate", "profile", "--once"} <= found
    assert "--find-replicas" not in found


def words(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Words of the printed completion script."""
    return set(re.findall(r"[a-z-]+", capsys.readouterr().out))
