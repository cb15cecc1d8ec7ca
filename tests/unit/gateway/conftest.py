"""Tiny models without weights, created once."""

from pathlib import Path

import pytest

from shared.models.tiny import make_tiny_models
from tests.unit.gateway.rig import DoorRig


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_models(tmp_path_factory.mktemp("models"), weights=False)


@pytest.fixture(scope="session")
def door_rig(models: Path) -> DoorRig:
    return DoorRig(models)
