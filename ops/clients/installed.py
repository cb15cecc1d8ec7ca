"""Environments that hold the built client and nothing else of this repository."""

import sys
from pathlib import Path

from ops.clients.packing import run_builder


def python_with(wheel: Path, folder: Path, *others: str) -> Path:
    """
    Make a virtual environment in *folder* with *wheel* and *others*, requirements of pip.

    Returns:
        Its interpreter.

    Raises:
        SettingsError: pip fails, for example because no package index answers.
    """
    run_builder([sys.executable, "-m", "venv", str(folder)], Path.cwd())
    interpreter = folder / "bin" / "python"
    install = (str(interpreter), "-m", "pip", "install", "--quiet")
    run_builder([*install, str(wheel.resolve()), *others], folder)
    return interpreter
