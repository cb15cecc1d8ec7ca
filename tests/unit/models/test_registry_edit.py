"""Changes of registry files by several writers, and what readers find meanwhile."""

import multiprocessing
from pathlib import Path

import msgspec
import pytest

from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.models.registry_edit import registry_edit

WRITERS, MODELS_EACH = 4, 10


def entry(name: str, path: Path | str = "/models/x") -> ModelEntry:
    return ModelEntry(
        name=ModelName(name), path=str(path), architecture="LlamaForCausalLM", max_model_len=64
    )


def add_models(path: Path, writer: int) -> None:
    for number in range(MODELS_EACH):
        with registry_edit(path) as edit:
            edit.add(entry(f"model-{writer}-{number}"))


def test_no_change_of_concurrent_writers_is_lost(tmp_path: Path):
    path = tmp_path / "registry.json"
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=add_models, args=(path, n)) for n in range(WRITERS)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            ModelRegistry.load(path)  # never finds a part of a file
    for writer in writers:
        writer.join()

    assert len(ModelRegistry.load(path).bases) == WRITERS * MODELS_EACH


def test_a_refused_change_leaves_the_file(tmp_path: Path):
    path = tmp_path / "registry.json"
    with registry_edit(path) as edit:
        edit.add(entry("a"))
    before = path.read_bytes()
    with pytest.raises(SettingsError, match="'a' exists"), registry_edit(path) as edit:
        edit.add(entry("a"))
    with pytest.raises(SettingsError, match="name 'a'"), registry_edit(path) as edit:
        edit.add(msgspec.structs.replace(entry("b"), aliases=("a",)))

    assert path.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == [".registry.json.lock", path.name]


def test_directories_beside_the_file_are_relative(tmp_path: Path):
    path = tmp_path / "registry.json"
    with registry_edit(path) as edit:
        edit.add(entry("inside", tmp_path / "models" / "inside"))
        edit.add(entry("outside", "/models/outside"))
        edit.add_adapter("inside", "sql", tmp_path / "sql")
        written = dict(edit.models)

    assert written[ModelName("inside")].path == "models/inside"
    assert written[ModelName("inside")].adapters == {"sql": "sql"}
    registry = ModelRegistry.load(path)
    assert registry.entry(ModelName("inside")).path == str(tmp_path / "models" / "inside")
    assert registry.entry(ModelName("inside")).adapters == {"sql": str(tmp_path / "sql")}
    assert registry.entry(ModelName("outside")).path == "/models/outside"


def test_a_link_to_the_file_remains_a_link(tmp_path: Path):
    file, link = tmp_path / "file.json", tmp_path / "link.json"
    with registry_edit(file) as edit:
        edit.add(entry("a"))
    link.symlink_to(file)
    with registry_edit(link) as edit:
        edit.add(entry("b"))

    assert link.is_symlink()
    assert ModelRegistry.load(file).bases == ("a", "b")


def test_models_and_adapters_are_removed_by_name(tmp_path: Path):
    path = tmp_path / "registry.json"
    with registry_edit(path) as edit:
        edit.add(entry("a"))
        edit.add_adapter("a", "sql", tmp_path)
        edit.add(entry("b"))
    with registry_edit(path) as edit:
        edit.remove("sql")
        edit.remove("b")
        with pytest.raises(SettingsError, match="no model 'b'; its models: a"):
            edit.remove("b")

    registry = ModelRegistry.load(path)
    assert registry.names == ("a",)
