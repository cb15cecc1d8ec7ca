"""What a set-up of `.venv` installs, and what it remembers."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ops import setup


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with pip, elsewhere."""
    directory = tmp_path / ".venv"
    python = directory / "bin" / "python"
    pip = directory / "lib" / "python3.11" / "site-packages" / "pip"
    python.parent.mkdir(parents=True)
    python.touch()
    pip.mkdir(parents=True)
    monkeypatch.setattr(setup, "VENV", directory)
    monkeypatch.setattr(setup, "PYTHON", python)
    monkeypatch.setattr(setup, "VLLM_REASON", directory / "vllm-unavailable.txt")
    monkeypatch.setattr(setup, "NO_VLLM", directory / "setup-no-vllm")
    return directory


@pytest.fixture
def stages(venv: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages that were gone through, none of which does anything."""
    gone: list[str] = []

    def stage(name: str, _install: Callable[[], bool], _inputs: list[Path]) -> None:
        gone.append(name)

    monkeypatch.setattr(setup, "stage", stage)
    return gone


def set_up(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["setup.py", *arguments])
    return setup.main()


def test_vllm_is_installed_unless_it_was_left_out(
    stages: list[str], venv: Path, monkeypatch: pytest.MonkeyPatch
):
    assert set_up(monkeypatch) == 0
    assert stages == ["vllm", "headway", "kernels"]
    assert not setup.VLLM_REASON.exists()


def test_leaving_vllm_out_holds_until_it_is_wanted(
    stages: list[str], monkeypatch: pytest.MonkeyPatch
):
    set_up(monkeypatch, "--no-vllm")
    set_up(monkeypatch)
    assert stages == ["headway", "kernels"] * 2
    assert "left out" in setup.VLLM_REASON.read_text()

    set_up(monkeypatch, "--vllm")
    set_up(monkeypatch)
    assert stages[4:] == ["vllm", "headway", "kernels"] * 2
    assert not setup.VLLM_REASON.exists()


def test_an_environment_without_pip_is_made_anew(
    stages: list[str], venv: Path, monkeypatch: pytest.MonkeyPatch
):
    """As it is left where venv has no pip to install."""
    made: list[Path] = []
    monkeypatch.setattr(setup.venv, "create", lambda where, **_: made.append(where))
    set_up(monkeypatch)
    assert made == []

    (venv / "lib" / "python3.11" / "site-packages" / "pip").rmdir()
    set_up(monkeypatch)
    assert made == [venv]


def test_it_says_what_makes_environments(
    stages: list[str],
    venv: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fail(_where: Path, **_: object) -> None:
        raise subprocess.CalledProcessError(1, "ensurepip")

    setup.PYTHON.unlink()
    monkeypatch.setattr(setup.venv, "create", fail)

    assert set_up(monkeypatch) == 1
    assert stages == []
    assert "python3-venv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "options"), [("", []), ("VLLM=no", ["--no-vllm"]), ("VLLM=yes", ["--vllm"])]
)
def test_make_passes_the_choice_on(given: str, options: list[str]):
    told = subprocess.run(
        ["make", "--dry-run", "demo", *given.split()],
        cwd=setup.ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )

    assert told.stdout.splitlines()[0].split() == ["python3", "ops/setup.py", *options]
