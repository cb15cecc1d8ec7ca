"""Environments that hold a built client and nothing else of this repository."""

import sys
from collections.abc import Sequence
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


def node_with(tarball: Path, folder: Path, others: Sequence[str] = ()) -> Path:
    """
    Install *tarball* and *others*, specifiers of npm, into *folder*.

    Returns:
        The folder, for programs in it.

    Raises:
        SettingsError: npm is not installed or fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
    options = ("--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error")
    run_builder(["npm", "install", *options, str(tarball.resolve()), *others], folder)
    return folder
