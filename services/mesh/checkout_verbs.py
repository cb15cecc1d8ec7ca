"""Verbs of `headway` whose programs are part of a checkout, not of the installed package."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from shared.contracts.errors import SettingsError
from shared.runtime.lifecycle import EXIT_OK

PROGRAMS = {"simulate": "ops.sim", "profile": "ops.profiling"}
"""Verb -> module of its program."""


def run_from_checkout(verb: str, arguments: Sequence[str]) -> int:
    """
    Run the program of *verb* with *arguments* and return its exit code.

    Raises:
        SettingsError: The program cannot be imported, since no checkout is found.
    """
    module = PROGRAMS[verb]
    if not _is_importable(module):
        raise SettingsError(
            f"`{verb}` is part of a checkout, not of the installed package. Clone the "
            f"repository, run `make setup` there, then: .venv/bin/headway {verb} ..."
        )
    try:
        return subprocess.run(  # noqa: S603 - this Python, our module
            [sys.executable, "-m", module, *arguments], check=False
        ).returncode
    except KeyboardInterrupt:
        return EXIT_OK


def _is_importable(module: str) -> bool:
    """True if a checkout is found: in an editable install, or in the root of a checkout."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
