"""Models that are added to a registry file while a process runs."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from shared.contracts.base import ModelName
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.models import ModelEntry
from shared.models.additions import RegistryAdditions
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import make_tiny_models
from tests.queued import MODEL

NEW, OTHER_NEW = ModelName("new"), ModelName("other-new")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_tiny_models(tmp_path, weights=False)


def write(path: Path, registry: ModelRegistry, *names: ModelName) -> None:
    """Write all models of *registry*, and copies of the first one with *names*."""
    entries = [registry.entry(base) for base in registry.bases]
    copies = [msgspec.structs.replace(entries[0], name=name) for name in names]
    write_registry(path, [*entries, *copies])


def test_an_unchanged_file_has_no_additions(path: Path):
    assert RegistryAdditions(path, ModelRegistry.load(path)).read() == ()


def test_new_models_are_returned_once(path: Path):
    registry = ModelRegistry.load(path)
    additions = RegistryAdditions(path, registry)
    write(path, registry, NEW)
    (entry,) = additions.read()
    registry.add(entry)

    assert registry.resolve("new").base == NEW
    assert additions.read() == ()


async def test_a_model_that_cannot_be_prepared_is_logged_and_not_added(path: Path):
    registry = ModelRegistry.load(path)
    additions = RegistryAdditions(path, registry)
    write(path, registry, NEW, OTHER_NEW)
    stop = asyncio.Event()

    async def prepare(entry: ModelEntry) -> None:
        if entry.name == NEW:
            raise EngineError("no tokenizer")
        stop.set()

    with capture_logs() as logs:
        await additions.follow(stop, prepare)

    assert NEW not in registry.bases
    assert OTHER_NEW in registry.bases
    assert [line["event"] for line in logs] == ["model.refused", "model.added"]


async def test_a_model_whose_files_come_later_is_added(path: Path):
    registry = ModelRegistry.load(path)
    additions = RegistryAdditions(path, registry)
    write(path, registry, NEW)
    stop = asyncio.Event()
    attempts: list[ModelName] = []

    async def prepare(entry: ModelEntry) -> None:
        attempts.append(entry.name)
        if len(attempts) < 3:
            raise EngineError("no tokenizer")
        stop.set()

    with capture_logs() as logs:
        await additions.follow(stop, prepare)

    assert NEW in registry.bases
    assert [line["event"] for line in logs] == ["model.refused", "model.added"]


def test_an_invalid_file_changes_nothing(path: Path):
    registry = ModelRegistry.load(path)
    additions = RegistryAdditions(path, registry)
    path.write_text("{")
    with capture_logs() as logs:
        assert additions.read() == ()

    assert [line["event"] for line in logs] == ["registry.refused"]
    write(path, registry, NEW)
    assert len(additions.read()) == 1


def test_a_name_that_exists_adds_nothing(path: Path):
    registry = ModelRegistry.load(path)
    entry = msgspec.structs.replace(registry.entry(MODEL), name=NEW, aliases=("also", MODEL))
    with pytest.raises(SettingsError, match=MODEL):
        registry.add(entry)

    assert NEW not in registry.bases
    assert "also" not in registry.names
