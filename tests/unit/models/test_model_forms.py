"""Models that take tokens, and models that take bodies."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.models.registry import ModelRegistry


def registry_with(directory: Path, **fields: Any) -> ModelRegistry:
    path = directory / "registry.json"
    path.write_bytes(msgspec.json.encode({"models": [{"name": "m", "max_model_len": 64} | fields]}))
    return ModelRegistry.load(path)


def test_model_that_takes_bodies_needs_no_files(tmp_path: Path) -> None:
    entry = registry_with(tmp_path, takes="bodies").entry(ModelName("m"))

    assert (entry.takes_bodies, entry.path) == (True, "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "'m' has no path"),
        ({"takes": "bodies", "path": "m"}, "takes no path"),
        ({"takes": "bodies", "tool_parser": "hermes"}, "takes no tool_parser"),
        ({"takes": "bodies", "engine_args": {"seed": 1}}, "takes no engine_args"),
        ({"takes": "bodies", "task": "embed"}, "its task must be `generate`"),
        ({"takes": "text"}, "Invalid enum value 'text'"),
    ],
)
def test_fields_that_contradict_the_form_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        registry_with(tmp_path, **fields)
