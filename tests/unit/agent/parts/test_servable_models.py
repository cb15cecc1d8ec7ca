"""Models that are added to an agent while it serves."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from services.agent.servable import ServableModels
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models


class AddedTo:
    """Engine that records the models that are added to it."""

    def __init__(self) -> None:
        self.added: list[ModelEntry] = []

    def add(self, entry: ModelEntry) -> None:
        self.added.append(entry)


@pytest.fixture
def entry(tmp_path: Path) -> ModelEntry:
    registry = ModelRegistry.load(make_tiny_models(tmp_path, weights=False))
    return registry.entry(registry.bases[0])


async def test_a_model_is_not_added_if_its_release_begins_meanwhile(entry: ModelEntry) -> None:
    models, engine = ServableModels([entry]), AddedTo()
    adding = asyncio.create_task(models.add(entry, engine))  # type: ignore[arg-type]
    await asyncio.sleep(0)  # its tokenizer is read in a thread
    models.releasing.add(entry.name)

    with pytest.raises(SettingsError, match="still serves the former model"):
        await adding
    assert engine.added == []


async def test_a_name_of_another_model_is_not_free(entry: ModelEntry) -> None:
    models, engine = ServableModels([entry]), AddedTo()
    other = msgspec.structs.replace(entry, max_model_len=64)

    with pytest.raises(SettingsError, match="still serves the former model"):
        await models.add(other, engine)  # type: ignore[arg-type]
    models.remove(entry.name)
    await models.add(other, engine)  # type: ignore[arg-type]
    assert engine.added == [other]
