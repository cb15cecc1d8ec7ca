"""Tasks of models in the registry."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.agent.backends.weights import engine_shape
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_POOLING_MODELS, make_tiny_models


def registry_with(path: Path, **fields: Any) -> ModelRegistry:
    entry = {"name": "m", "path": "m", "architecture": "", "max_model_len": 64} | fields
    path.write_bytes(msgspec.json.encode({"models": [entry]}))
    return ModelRegistry.load(path)


def test_a_model_without_a_task_generates(tmp_path: Path) -> None:
    entry = registry_with(tmp_path / "registry.json").entry(ModelName("m"))

    assert (entry.task, entry.pools) == ("generate", False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "embedding"}, "Invalid enum value 'embedding'"),
        ({"task": "embed", "tool_parser": "hermes"}, "takes no tool_parser"),
        ({"task": "classify", "reasoning_parser": "qwen3"}, "takes no reasoning_parser"),
        ({"engine_args": {"runner": "pooling"}}, "set the model's task"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        registry_with(tmp_path / "registry.json", **fields)


def test_engines_of_two_tasks_are_not_exchanged(tmp_path: Path) -> None:
    registry = ModelRegistry.load(
        make_tiny_models(tmp_path, weights=False, models=TINY_POOLING_MODELS)
    )
    entry = registry.entry(ModelName("tiny-embed"))

    assert entry.pools
    assert engine_shape(entry) != engine_shape(msgspec.structs.replace(entry, task="generate"))
