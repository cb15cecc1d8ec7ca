"""`headway simulate`: the simulator of a checkout, which is no part of an installed mesh."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from shared.contracts.errors import SettingsError
from shared.runtime.lifecycle import EXIT_OK

_MODULE = "ops.sim"
_ABSENT = (
    "the simulator is part of a checkout, not of the installed package. Clone the repository, "
    "run `make setup` there, and then in it: .venv/bin/headway simulate ..."
)


def simulate(arguments: Sequence[str]) -> int:
    """
    Run the simulator with *arguments*; gives its exit code.

    Raises:
        SettingsError: There is no checkout.
    """
    if not _is_there():
        raise SettingsError(_ABSENT)
    try:
        return subprocess.run(  # noqa: S603 - this Python, our module
            [sys.executable, "-m", _MODULE, *arguments], check=False
        ).returncode
    except KeyboardInterrupt:
        return EXIT_OK


def _is_there() -> bool:
    """Whether this Python finds the simulator: from an editable install, or in a checkout."""
    try:
        return importlib.util.find_spec(_MODULE) is not None
    except ModuleNotFoundError:
        return False
