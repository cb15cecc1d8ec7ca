"""Digests of stored measurements include every module on which a measurement depends."""

from pathlib import Path

import pytest

from ops.bench import store
from ops.bench.store import ROOT, code_digest, imported_files

DEPENDS = (
    ("ops.bench.cells", "ops/baselines/scheduling/polyserve.py"),
    ("ops.bench.cells", "shared/contracts/qos.py"),
    ("ops.bench.qlm_cells", "ops/baselines/planning/shepherd.py"),
    ("ops.bench.qlm_cells", "solver/planning/generator.py"),
    ("ops.bench.quartz_cells", "ops/sim/limits.py"),
    ("ops.bench.planner_cells", "ops/baselines/planning/vehicle_routing.py"),
    ("ops.bench.planner_published", "services/planner/lane_totals.py"),
    ("ops.bench.planner_loop", "services/planner/leader/plan_worker.py"),
)


@pytest.mark.parametrize(("module", "file"), DEPENDS)
def test_measurements_depend_on_all_imported_code(module: str, file: str):
    assert ROOT / file in imported_files([module])


def test_code_that_is_not_imported_does_not_count():
    assert ROOT / "ops/bench/overhead.py" not in imported_files(["ops.bench.qlm_cells"])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with data and three modules, two of which import each other."""
    monkeypatch.setattr(store, "ROOT", tmp_path)
    package = tmp_path / "pack"
    package.mkdir()
    (package / "first.py").write_text("import json\nfrom pack import second\n")
    (package / "second.py").write_text("def late():\n    import pack.first\n")
    (package / "other.py").write_text("")
    (package / "data.json").write_text("{}")
    return package


def test_imports_are_followed_in_functions_and_circles(repository: Path):
    expected = {repository / "first.py", repository / "second.py"}

    assert imported_files(["pack.first"]) == imported_files(["pack.second"]) == expected


@pytest.mark.parametrize(
    ("changed", "counts"), [("second.py", True), ("data.json", True), ("other.py", False)]
)
def test_a_digest_changes_with_imported_code_and_data(
    repository: Path, changed: str, *, counts: bool
):
    before = code_digest(["pack.first"], data=["pack"])
    with (repository / changed).open("a") as file:
        file.write(" ")

    assert (code_digest(["pack.first"], data=["pack"]) != before) is counts
