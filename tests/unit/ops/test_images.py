"""The Dockerfile installs what each service needs and nothing else."""

import re

import pytest

from tests.unit.ops.deployment import ROOT, installed_extras, parent, pyproject, stages

EXTRAS = {
    "gateway": ["gateway"],
    "planner": ["planner"],
    "estimator": ["estimator"],
    "agent": ["agent"],
    "agent-vllm": ["agent", "vllm"],
}


def packages(extras: list[str]) -> set[str]:
    """Names of all direct requirements of the wheel with *extras*."""
    project = pyproject()["project"]
    requirements = [*project["dependencies"]]
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def test_there_is_one_target_for_each_service():
    targets = {stage: installed_extras(stage) for stage in stages() if installed_extras(stage)}

    assert targets == EXTRAS


@pytest.mark.parametrize("target", EXTRAS)
def test_a_target_installs_an_extra_that_exists(target: str):
    assert set(installed_extras(target)) <= pyproject()["project"]["optional-dependencies"].keys()


@pytest.mark.parametrize("target", EXTRAS)
def test_a_target_does_not_run_as_root(target: str):
    users = [line for line in stages()[target] if line.startswith("USER ")]

    assert users == ["USER headway"]


@pytest.mark.parametrize(
    ("target", "unwanted"),
    [
        ("gateway", {"torch", "vllm", "ortools"}),
        ("planner", {"torch", "vllm", "tokenizers"}),
        ("estimator", {"torch", "vllm", "ortools", "tokenizers"}),
        ("agent", {"torch", "vllm", "ortools"}),
        ("agent-vllm", {"ortools"}),
    ],
)
def test_a_target_omits_heavy_packages_of_other_targets(target: str, unwanted: set[str]):
    assert packages(installed_extras(target)) & unwanted == set()


def test_every_image_except_the_gpu_one_uses_the_lock_file():
    locked = {stage for stage in EXTRAS if parent(stage) == "locked"}
    constrained = {
        stage
        for stage in EXTRAS
        if any("--constraint /dist/lock.txt" in line for line in stages()[stage])
    }

    assert locked == constrained == EXTRAS.keys() - {"agent-vllm"}


def test_the_build_context_contains_everything_that_is_copied():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for lines in stages().values()
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }

    assert copied == allowed
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_the_wheel_stage_contains_all_inputs_of_the_wheel():
    copied = {s for line in stages()["wheel"] if "COPY" in line for s in line.split()[1:-1]}
    project = pyproject()
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    metadata = {project["project"]["readme"], *project["project"]["license-files"]}

    assert copied == {*wheel["packages"], *metadata, "pyproject.toml"}
