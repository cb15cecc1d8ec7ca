"""Tiny models without weights, created once."""

from pathlib import Path

import pytest

from shared.models.tiny import make_tiny_models
from tests.unit.gateway.rig import IntakeRig


@pytest.fixture(scope="session")
def intake_rig(tmp_path_factory: pytest.TempPathFactory) -> IntakeRig:
    registry: Path = make_tiny_models(tmp_path_factory.mktemp("models"), weights=False)
    return IntakeRig(registry)
