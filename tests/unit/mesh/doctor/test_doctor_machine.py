"""What the doctor concludes from a machine's limits, disk, models and vLLM."""

import resource
import tomllib
from pathlib import Path

import msgspec
import pytest
from packaging.requirements import Requirement

from services.mesh.doctor.findings import Finding, Level
from services.mesh.doctor.machine import (
    LEAST_FREE_BYTES,
    LEAST_OPEN_FILES,
    VLLM,
    on_disk,
    on_machine,
    on_open_files,
    on_registry,
    on_vllm,
)
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import make_tiny_models

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return make_tiny_models(tmp_path / "models", weights=False)


def test_few_open_files_deviate():
    low = on_open_files(1024, 524288)
    bound = on_open_files(1024, 2048)

    assert (low.level, bound.level) == (Level.DEVIATION, Level.DEVIATION)
    assert "ulimit -n 65536" in low.remedy
    assert "2048" in bound.remedy


@pytest.mark.parametrize("soft", [LEAST_OPEN_FILES, resource.RLIM_INFINITY])
def test_enough_open_files_do_not_deviate(soft: int):
    assert on_open_files(soft, resource.RLIM_INFINITY).level is Level.OK


def test_full_disk_deviates_and_is_named():
    full = on_disk(Path("/data"), LEAST_FREE_BYTES - 1)

    assert full.level is Level.DEVIATION
    assert "/data" in full.what
    assert on_disk(Path("/data"), LEAST_FREE_BYTES).level is Level.OK


def test_broken_registry_deviates(tmp_path: Path):
    broken = tmp_path / "registry.json"
    broken.write_text("[{")
    (finding,) = on_registry(broken)

    assert finding.level is Level.DEVIATION
    assert str(broken) in finding.what


def test_models_without_weights_are_for_simulated_engines(registry: Path):
    findings = list(on_registry(registry))

    assert {each.level for each in findings} == {Level.NOTE}
    assert all("simulated" in each.consequence for each in findings)


def test_model_whose_directory_is_missing_is_named(registry: Path, tmp_path: Path):
    loaded = ModelRegistry.load(registry)
    names = sorted(loaded.bases)
    entries = [loaded.entry(name) for name in names]
    entries[0] = msgspec.structs.replace(entries[0], path=str(tmp_path / "nowhere"))
    write_registry(registry, entries)
    deviating = [each for each in on_registry(registry) if each.level is Level.DEVIATION]

    assert [names[0] in each.what for each in deviating] == [True]
    assert str(tmp_path / "nowhere") in deviating[0].what


@pytest.mark.parametrize(
    ("version", "level"),
    [
        (None, Level.NOTE),
        ("0.32.0", Level.OK),
        ("0.32.1+cpu", Level.OK),
        ("0.33.0", Level.DEVIATION),
        ("0.11.2", Level.DEVIATION),
    ],
)
def test_only_supported_releases_of_vllm_are_ok(version: str | None, level: Level):
    assert on_vllm(version).level is level


def test_releases_are_those_of_the_package():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = map(Requirement, pyproject["project"]["optional-dependencies"]["vllm"])

    assert [each.specifier for each in extra if each.name == "vllm"] == [VLLM]


def test_machine_is_checked_without_its_data_directory(tmp_path: Path, registry: Path):
    findings: list[Finding] = list(on_machine(data_dir=tmp_path / "a" / "b", registry=registry))

    assert {each.check for each in findings} == {"open files", "disk", "models", "engines"}
    (disk,) = [each for each in findings if each.check == "disk"]
    assert str(tmp_path) in disk.what
