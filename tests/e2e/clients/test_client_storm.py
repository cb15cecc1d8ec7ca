"""The built wheel in a storm of kills, freezes and a restart of the broker."""

from pathlib import Path

import pytest

from ops.bench.storm import storm
from tests.brokers import release_of

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq]
NUM_REQUESTS = 400


async def test_a_storm_loses_doubles_and_changes_no_answer(python: Path, tmp_path: Path) -> None:
    release_of("rabbitmq")

    result = await storm(python, tmp_path, num_requests=NUM_REQUESTS, seed=0)

    assert {line.name: line.value for line in result.lines if not line.holds} == {}
    assert set(result.figures["disturbances"]) == {"kill", "freeze", "restart"}
