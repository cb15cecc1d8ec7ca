"""The store that `headway up` configures, and the verb `headway store`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.mesh.cli import MeshProgram, main
from services.mesh.verbs.cli_up import DATA_DIR, UpOptions, store_values
from shared.contracts.errors import SettingsError
from shared.store.migrations import HEAD


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Restore logging after each test, because commands configure it for this process."""
    yield
    structlog.reset_defaults()


def options(*given: str) -> UpOptions:
    _, bound, _ = MeshProgram().parsed(["up", *given])
    found: UpOptions = bound.arguments.get("options", UpOptions())
    return found


def values(*given: str, **environ: str) -> dict[str, Any]:
    found = store_values(options(*given), environ)
    assert found is not None
    return found


def test_the_default_is_a_directory_beside_the_logs():
    found = values()

    assert found["data_dir"] == str(Path(DATA_DIR).absolute())
    assert (found["url"], found["files"]) == (None, None)


def test_options_override_variables():
    environ = {"HEADWAY_STORE_DATA_DIR": "/from/environment"}

    assert values(**environ)["data_dir"] == "/from/environment"
    assert values("--data-dir", "/given", **environ)["data_dir"] == "/given"


def test_a_database_and_a_place_of_bodies_need_no_directory():
    found = values(HEADWAY_STORE_URL="postgresql://h/db", HEADWAY_STORE_FILES="s3://b")

    assert (found["url"], found["files"]) == ("postgresql://h/db", "s3://b")
    assert found["data_dir"] is None
    assert values(HEADWAY_STORE_URL="postgresql://h/db")["data_dir"] is not None


def test_there_may_be_no_store():
    assert store_values(options("--no-store"), {}) is None
    with pytest.raises(SettingsError, match="--no-store contradicts"):
        store_values(options("--no-store"), {"HEADWAY_STORE_URL": "postgresql://h/db"})


def test_the_verb_migrates_and_examines_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_STORE_DATA_DIR", str(tmp_path))

    def run(verb: str) -> tuple[int, Any]:
        code = main(["store", verb, "--json"])
        return code, json.loads(capsys.readouterr().out)

    before, unusable = run("status"), run("check")
    migrated, again = run("migrate"), run("migrate")
    after, usable = run("status"), run("check")

    assert (before[0], before[1]["revision"]) == (1, 0)
    assert unusable[0] == 1
    assert "run `headway store migrate`" in unusable[1]["problem"]
    assert (migrated[1]["before"], migrated[1]["after"]) == (0, HEAD)
    assert (again[1]["before"], again[1]["after"]) == (HEAD, HEAD)
    assert (after[0], after[1]["revision"], after[1]["num_files"]) == (0, HEAD, 0)
    assert (usable[0], usable[1]["problem"]) == (0, None)


def test_the_verb_needs_a_store_and_shows_no_password(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name in ("URL", "DATA_DIR", "FILES"):
        monkeypatch.delenv(f"HEADWAY_STORE_{name}", raising=False)
    without = main(["store", "status"])
    message = capsys.readouterr().err
    wrong = main(["store", "status", "--url", "mysql://u:secret@h/db", "--data-dir", "/x"])

    assert (without, wrong) == (2, 2)
    assert "--data-dir or --url" in message
    assert "secret" not in capsys.readouterr().err
