"""What builders of packages need: the version, and programs with readable failures."""

import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

from shared.contracts.errors import SettingsError

ROOT = Path(__file__).resolve().parents[2]


def version() -> str:
    """Version of the project, which is also that of its client."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def run_builder(command: Sequence[str], folder: Path) -> None:
    """
    Run a program that builds a package in *folder*.

    Raises:
        SettingsError: The program is not installed, or fails; the message has its output.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SettingsError(f"{command[0]} is not installed") from error
    if done.returncode:
        raise SettingsError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
