"""Verbs that are part of a checkout, not of the installed package."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

from cyclopts import Parameter

from shared.contracts.errors import SettingsError
from shared.runtime.lifecycle import EXIT_OK


def is_found(module: str) -> bool:
    """True if a checkout is found: in an editable install, or in the root of a checkout."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def absent(command: str) -> Callable[..., int]:
    """
    Verb in the place of *command* where no checkout is found: raises SettingsError.

    Args:
        command: As the user types it: `headway profile`.
    """

    def refuse(*_: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> int:
        raise _absence(command)

    return refuse


def run_from_checkout(command: str, module: str, arguments: Sequence[str]) -> int:
    """
    Run *module*, the program of *command*, with *arguments* and return its exit code.

    Args:
        command: As the user types it: `headway-agent check-engine`.
        module: Module of the checkout.
        arguments: Arguments of the program.

    Raises:
        SettingsError: The program cannot be imported, since no checkout is found.
    """
    if not is_found(module):
        raise _absence(command)
    try:
        return subprocess.run(  # noqa: S603 - this Python, our module
            [sys.executable, "-m", module, *arguments], check=False
        ).returncode
    except KeyboardInterrupt:
        return EXIT_OK


def _absence(command: str) -> SettingsError:
    return SettingsError(
        f"`{command}` is part of a checkout, not of the installed package. Clone the "
        f"repository, run `make setup` there, then: .venv/bin/{command} ..."
    )
