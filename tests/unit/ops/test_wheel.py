"""The wheel contains the services and their dependencies, and its commands run."""

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.unit.ops.deployment import build_wheel, pyproject

pytestmark = pytest.mark.slow
COMMANDS = sorted(pyproject()["project"]["scripts"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def run(unpacked: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command by the wheel's entry point, with the wheel's code."""
    file = next(unpacked.glob("*.dist-info/entry_points.txt"))
    entry_points = configparser.ConfigParser()
    entry_points.read(file)
    module, _, function = entry_points["console_scripts"][command].partition(":")
    code = f"""
import sys, {module} as command
assert command.__file__.startswith({str(unpacked)!r}), command.__file__
sys.exit(command.{function}())
"""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=unpacked,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_wheel_has_the_three_packages_and_nothing_else(unpacked: Path):
    packages = {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"}

    assert packages == {"services", "shared", "solver"}


def test_the_wheel_is_marked_as_typed(unpacked: Path):
    typed = sorted(str(path.relative_to(unpacked)) for path in unpacked.glob("*/py.typed"))

    assert typed == ["services/py.typed", "shared/py.typed", "solver/py.typed"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_its_help(unpacked: Path, command: str):
    done = run(unpacked, command, "--help")

    assert (done.returncode, done.stderr) == (0, "")
    assert "Exit codes: 0 ok, 1 failed" in " ".join(done.stdout.split())


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "headway"])
def test_a_service_shows_its_settings(unpacked: Path, command: str):
    arguments = ["--set", "instance_id=a1"] if command == "headway-agent" else []
    done = run(unpacked, command, "check-config", "--json", *arguments)

    assert (done.returncode, done.stderr) == (0, "")
    assert '"amqp_url":"amqp://***@127.0.0.1:5672/"' in done.stdout
