"""Services and programs that tests need: if one is missing, tests skip, or fail on request."""

import importlib
import os
import shutil
from typing import Any, NoReturn

import pytest

from ops import prometheus


def absent(what: str, requirement: str) -> NoReturn:
    """Skip the test, or fail it if the variable HEADWAY_REQUIRE lists *requirement*."""
    if requirement in os.environ.get("HEADWAY_REQUIRE", "").split(","):
        pytest.fail(f"{what}, and HEADWAY_REQUIRE lists {requirement}", pytrace=False)
    pytest.skip(what, allow_module_level=True)


def module(name: str) -> Any:
    """Import module *name*; its first part is the requirement."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        absent(f"{name} cannot be imported: {error}", str(error.name or name).partition(".")[0])


class Late:
    """
    Module *name*, imported at its first use, so that collecting tests does not load the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(module(self._name), attribute)


def program(name: str, package: str) -> str:
    """Path of program *name*, which the system's *package* installs."""
    found = shutil.which(name)
    if found is None:
        absent(f"{name} is not installed; {package} has it", package)
    return found


def promtool() -> str:
    """Path of promtool, unpacked for the project or of the system."""
    found = prometheus.program("promtool")
    if found is None:
        absent("promtool is not installed; `python -m ops.prometheus install` does it", "promtool")
    return found
