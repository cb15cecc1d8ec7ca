"""`headway simulate`, as users start it."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.mesh import cli
from services.mesh.cli import main

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\n"


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.mesh", "simulate", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_tiny_run_gives_figures_as_json():
    done = simulate("--qps", "2", "--hours", "0.01", "--dispatch", "pull", "--json")
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
    assert "argument --wave: '5:-1' is not LOW:HIGH" in printed
    assert "Traceback" not in printed


def test_missing_checkout_error_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(cli.CHECKOUT_PROGRAMS, "simulate", "ops_of_no_checkout.sim")

    assert main(["simulate", "--qps", "2"]) == 2
    assert "part of a checkout" in capsys.readouterr().err
