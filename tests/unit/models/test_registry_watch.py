"""Changes of the registry file while a process runs."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from shared.contracts.base import ModelName
from shared.contracts.errors import ContractError, EngineError, ModelNotReadyError, SettingsError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry, write_registry
from shared.models.tiny import make_tiny_models
from shared.models.watch import RegistryWatch
from tests.queued import MODEL, OTHER

NEW, OTHER_NEW = ModelName("new"), ModelName("other-new")


class Steps:
    """Records steps; a step about a model in `broken` fails."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, ModelName]] = []
        self.broken: set[ModelName] = set()

    async def add(self, entry: ModelEntry) -> None:
        self._take("add", entry.name)

    async def replace(self, entry: ModelEntry) -> None:
        self._take("replace", entry.name)

    async def remove(self, model: ModelName) -> None:
        self._take("remove", model)

    def _take(self, step: str, model: ModelName) -> None:
        self.taken.append((step, model))
        if model in self.broken:
            raise EngineError("no tokenizer")


class Rig:
    """A registry file with the tiny models, and a process that follows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.registry = ModelRegistry.load(path)
        self.entries = {base: self.registry.entry(base) for base in self.registry.bases}
        self.steps = Steps()
        self.watch = RegistryWatch(path, self.registry, self.steps)

    async def write(self, *removed: ModelName, **changed: Any) -> None:
        """Write the file without *removed* and with *changed* entries, and follow it."""
        for model in removed:
            del self.entries[model]
        self.entries |= changed  # type: ignore[arg-type]  # names are keywords here
        write_registry(self.path, self.entries.values())
        await self.watch.apply()

    def like_first(self, name: ModelName, **fields: Any) -> ModelEntry:
        return msgspec.structs.replace(self.entries[MODEL], name=name, **fields)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(make_tiny_models(tmp_path, weights=False))


async def test_an_unchanged_file_has_no_effect(rig: Rig):
    await rig.watch.apply()
    await rig.write()

    assert rig.steps.taken == []


async def test_an_added_model_can_be_named_after_its_step(rig: Rig):
    await rig.write(new=rig.like_first(NEW))
    await rig.watch.apply()

    assert rig.steps.taken == [("add", NEW)]
    assert rig.registry.resolve("new").base == NEW


async def test_content_counts_and_not_the_time_of_the_file(rig: Rig):
    """A link may be changed to another file with an equal time and size."""
    before = rig.path.stat()
    other = rig.path.with_name("other.json")
    write_registry(other, [*rig.entries.values(), rig.like_first(NEW)])
    padding = before.st_size - other.stat().st_size
    link = rig.path.with_name("link.json")
    link.symlink_to(rig.path)
    watch = RegistryWatch(link, rig.registry, rig.steps)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    link.unlink()
    link.symlink_to(other)
    await watch.apply()

    assert padding < 0  # the new file is the larger one
    assert other.stat().st_mtime_ns == before.st_mtime_ns
    assert NEW in rig.registry.bases


async def test_a_removed_model_cannot_be_named_and_keeps_its_entry(rig: Rig):
    entry = rig.registry.entry(OTHER)
    await rig.write(OTHER)

    assert rig.steps.taken == [("remove", OTHER)]
    with pytest.raises(ContractError, match="does not exist"):
        rig.registry.resolve(OTHER)
    assert rig.registry.entry(OTHER) == entry
    removed = rig.registry.removed(OTHER)
    assert removed is not None
    assert removed.base == OTHER


async def test_a_removed_model_can_be_added_again(rig: Rig):
    entry = rig.entries[OTHER]
    await rig.write(OTHER)
    await rig.write(**{OTHER: entry})

    assert rig.steps.taken == [("remove", OTHER), ("add", OTHER)]
    assert rig.registry.resolve(OTHER).base == OTHER
    assert rig.registry.removed(OTHER) is None


async def test_names_and_adapters_change_while_the_model_is_served(rig: Rig):
    changed = rig.like_first(MODEL, aliases=("also",), adapters={"sql": "/adapters/sql"})
    await rig.write(**{MODEL: changed})

    assert rig.steps.taken == [("replace", MODEL)]
    assert rig.registry.resolve("also").base == MODEL
    assert rig.registry.resolve("sql").adapter == "sql"
    await rig.write(**{MODEL: rig.like_first(MODEL, aliases=(), adapters={})})
    with pytest.raises(ContractError, match="does not exist"):
        rig.registry.resolve("sql")
    former = rig.registry.removed("sql")
    assert former is not None
    assert former.adapter == "sql"


async def test_another_change_is_refused_with_the_reason(rig: Rig):
    with capture_logs() as logs:
        await rig.write(**{MODEL: rig.like_first(MODEL, max_model_len=64)})
        await rig.watch.apply()

    assert rig.registry.entry(MODEL).max_model_len > 64
    assert [line["event"] for line in logs] == ["registry.changed", "model.refused"]
    assert "max_model_len of a served model cannot change" in rig.watch.state.pending[MODEL]
    assert rig.watch.state.digest != rig.registry.digest
    await rig.write(MODEL)
    await rig.write(**{MODEL: msgspec.structs.replace(rig.entries[OTHER], name=MODEL)})
    assert rig.watch.state.pending == {}


async def test_a_model_whose_files_come_later_is_added(rig: Rig):
    rig.steps.broken.add(NEW)
    with capture_logs() as logs:
        await rig.write(new=rig.like_first(NEW), other=rig.like_first(OTHER_NEW))
        await rig.watch.apply()
    assert [line["event"] for line in logs] == ["registry.changed", "model.refused", "model.added"]
    assert rig.watch.state.pending == {NEW: "no tokenizer"}
    with pytest.raises(ModelNotReadyError, match="not ready yet"):
        rig.registry.resolve(NEW)

    rig.steps.broken.clear()
    await rig.watch.apply()
    assert rig.registry.resolve(NEW).base == NEW
    assert rig.watch.state.pending == {}


async def test_an_invalid_file_changes_nothing(rig: Rig):
    before = rig.watch.state
    rig.path.write_text("{")
    with capture_logs() as logs:
        await rig.watch.apply()
        await rig.watch.apply()

    assert [line["event"] for line in logs] == ["registry.refused"]
    assert rig.watch.state == before
    await rig.write(new=rig.like_first(NEW))
    assert NEW in rig.registry.bases


async def test_a_missing_file_changes_nothing(rig: Rig):
    rig.path.unlink()
    with capture_logs() as logs:
        await rig.watch.apply()
        await rig.watch.apply()

    assert [line["event"] for line in logs] == ["registry.refused"]
    assert MODEL in rig.registry.bases


@pytest.mark.parametrize(
    ("is_known", "error"), [(True, ModelNotReadyError), (False, ContractError)]
)
def test_a_model_of_other_processes_is_not_ready_here(
    rig: Rig, *, is_known: bool, error: type[Exception]
):
    rig.registry.is_expected = lambda _name: is_known

    with pytest.raises(error):
        rig.registry.resolve("theirs")


async def test_a_removed_model_does_not_exist_although_instances_still_serve_it(rig: Rig):
    rig.registry.is_expected = lambda _name: True
    await rig.write(OTHER)

    with pytest.raises(ContractError, match="does not exist"):
        rig.registry.resolve(OTHER)


def test_a_name_that_exists_adds_nothing(rig: Rig):
    with pytest.raises(SettingsError, match=MODEL):
        rig.registry.add(rig.like_first(NEW, aliases=("also", MODEL)))

    assert NEW not in rig.registry.bases
    assert "also" not in rig.registry.names


def test_a_replacement_with_a_name_that_exists_changes_nothing(rig: Rig):
    with pytest.raises(SettingsError, match=OTHER):
        rig.registry.replace(rig.like_first(MODEL, aliases=(OTHER,)))

    assert rig.registry.resolve(MODEL).base == MODEL
    assert rig.registry.resolve(OTHER).base == OTHER


async def test_a_name_is_seen_while_the_file_is_being_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads ask for names while the process reads the changed file."""
    read, answers = ModelRegistry.of_file, list[bool]()

    def read_slowly(path: Path, content: bytes) -> ModelRegistry:
        monkeypatch.setattr(ModelRegistry, "of_file", read)
        answers.append(rig.watch.sees(NEW))
        return read(path, content)

    monkeypatch.setattr(ModelRegistry, "of_file", read_slowly)
    await rig.write(new=rig.like_first(NEW))

    assert answers == [True]
    assert rig.steps.taken == [("add", NEW)]
