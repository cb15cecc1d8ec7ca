"""What tests need from the machine: absent things skip a test, or fail it if CI requires them."""

import importlib
import os
import shutil
from typing import Any, NoReturn

import pytest


def absent(what: str, requirement: str) -> NoReturn:
    """Skip, or fail if HEADWAY_REQUIRE lists *requirement*."""
    if requirement in os.environ.get("HEADWAY_REQUIRE", "").split(","):
        pytest.fail(f"{what}, and HEADWAY_REQUIRE lists {requirement}", pytrace=False)
    pytest.skip(what, allow_module_level=True)


def module(name: str) -> Any:
    """Module *name*, whose first part is the requirement."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        absent(f"{name} cannot be imported: {error}", str(error.name or name).partition(".")[0])


class Late:
    """
    Module *name*, imported at its first use: collecting and deselecting tests need not load it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(module(self._name), attribute)


def program(name: str, package: str) -> str:
    """Path of program *name*, which *package* installs."""
    found = shutil.which(name)
    if found is None:
        absent(f"{name} is not installed; {package} has it", package)
    return found
