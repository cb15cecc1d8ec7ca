"""The Dockerfile installs what each service needs and nothing else."""

import re

import pytest

from ops.release.images import TARGETS
from tests.unit.ops.deployment import ROOT, installed_extras, pyproject, stages

EXTRAS = {
    "gateway": ["gateway", "otel"],
    "planner": ["planner", "otel"],
    "estimator": ["estimator"],
    "agent": ["agent", "otel"],
    "headway": ["mesh", "otel"],
    "agent-vllm-cpu": ["agent", "otel"],
    "agent-vllm": ["agent", "otel", "vllm"],
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
    unlocked = {
        stage for stage in EXTRAS if any("packages-unlocked" in line for line in stages()[stage])
    }

    assert unlocked == {"agent-vllm"}


@pytest.mark.parametrize("target", EXTRAS)
def test_packages_are_installed_before_the_wheel_and_both_before_the_user(target: str):
    lines = stages()[target]
    steps = [
        next(number for number, line in enumerate(lines) if each in line)
        for each in ("install packages", "install wheel", "USER")
    ]

    assert steps == sorted(steps)
    assert all("from=wheel" not in line for line in lines[: steps[1]])


def test_every_image_is_part_of_a_release():
    assert set(TARGETS) == EXTRAS.keys()


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
    mounted = {
        match[1]
        for lines in stages().values()
        for line in lines
        for match in re.finditer(r"--mount=source=(\S+?),", line)
    }

    folders = {"/".join(source.split("/")[:2]) for source in copied | mounted}
    assert folders == allowed
    optional = "ops/docker/wheels*"
    assert [s for s in copied - {optional} | mounted if not (ROOT / s).exists()] == []


def test_the_wheel_stage_contains_all_inputs_of_the_wheel():
    copied = {s for line in stages()["wheel"] if "COPY" in line for s in line.split()[1:-1]}
    project = pyproject()
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    metadata = {project["project"]["readme"], *project["project"]["license-files"]}

    assert copied == {*wheel["packages"], *metadata, "pyproject.toml"}
