"""Models of vLLM engines, with a scripted host."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.models import EngineModels
from services.agent.backends.vllm.front.telemetry import EngineTelemetry
from services.agent.backends.vllm.shared.wire import Drop, Reply
from shared.contracts.base import ModelName
from shared.contracts.errors import NoRoomError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import Residency

SMALL, LARGE = ModelName("small"), ModelName("large")
MIB = 1 << 20
WEIGHTS = 10 * MIB
ESTIMATE = (384 + 10 + 128 + 256) * MIB
"""Memory of each engine in this module on a CPU: overhead, weights, KV, host copies of KV."""


class Host:
    """A fake host that loads immediately; each engine takes *host_bytes*."""

    def __init__(self, host_bytes: int) -> None:
        self._host_bytes = host_bytes
        self.commands: list[msgspec.Struct] = []

    def send(self, command: Any) -> None:
        self.commands.append(command)

    async def ask(self, command: Any, timeout_s: float) -> Reply:
        self.commands.append(command)
        return Reply(command.model, host_bytes=self._host_bytes)

    @property
    def dropped(self) -> list[str]:
        return [name for each in self.commands if isinstance(each, Drop) for name in each.models]


def entry(name: ModelName, directory: Path) -> ModelEntry:
    """An entry without a readable configuration; its shape equals that of no other entry."""
    return ModelEntry(
        name=name, path=str(directory), architecture="x", max_model_len=64, weight_bytes=WEIGHTS
    )


@pytest.fixture
async def telemetry() -> AsyncIterator[EngineTelemetry]:
    made = EngineTelemetry()
    made.directory()
    yield made
    made.close()


def models_of(directory: Path, telemetry: EngineTelemetry, warm_bytes: int) -> EngineModels:
    (directory / "model.bin").write_bytes(b"weights")
    entries = [entry(SMALL, directory), entry(LARGE, directory)]
    return EngineModels(entries, VllmSettings(warm_bytes=warm_bytes), telemetry)


async def test_warm_engine_that_fits_is_kept(tmp_path: Path, telemetry: EngineTelemetry) -> None:
    models = models_of(tmp_path, telemetry, warm_bytes=ESTIMATE)
    host = Host(ESTIMATE - 256 * MIB)
    await models.warm(SMALL, host)  # type: ignore[arg-type]  # a fake

    assert models.residency.residency(SMALL) is Residency.WARM
    assert models.residency.used_bytes == ESTIMATE
    assert host.dropped == []


async def test_engine_larger_than_expected_is_dropped_and_its_weights_are_kept(
    tmp_path: Path, telemetry: EngineTelemetry
) -> None:
    models = models_of(tmp_path, telemetry, warm_bytes=ESTIMATE)
    host = Host(ESTIMATE - 256 * MIB + 1)
    await models.warm(SMALL, host)  # type: ignore[arg-type]  # a fake

    assert host.dropped == [SMALL]
    assert models.residency.residency(SMALL) is Residency.WARM
    assert models.residency.used_bytes == WEIGHTS
    # The size of the engine is known now, so `warm` creates no second engine that would not fit.
    models.forget((SMALL,))
    host.commands.clear()
    await models.warm(SMALL, host)  # type: ignore[arg-type]  # a fake
    assert host.commands == []
    models.close()


async def test_warm_without_room_for_weights_is_refused(
    tmp_path: Path, telemetry: EngineTelemetry
) -> None:
    models = models_of(tmp_path, telemetry, warm_bytes=2 * ESTIMATE)
    host = Host(ESTIMATE - 256 * MIB)
    await models.warm(SMALL, host)  # type: ignore[arg-type]  # a fake
    greedy = Host(2 * ESTIMATE)
    models.residency.measured(SMALL, 2 * ESTIMATE - WEIGHTS + 1)
    with pytest.raises(NoRoomError, match="no room to warm large"):
        await models.warm(LARGE, greedy)  # type: ignore[arg-type]  # a fake

    assert models.residency.residency(LARGE) is Residency.COLD
    assert models.residency.residency(SMALL) is Residency.WARM


async def test_parked_engine_on_a_gpu_takes_its_weights_and_no_kv(
    tmp_path: Path, telemetry: EngineTelemetry
) -> None:
    models = models_of(tmp_path, telemetry, warm_bytes=ESTIMATE)
    expected = {each.model: each.warm_bytes for each in models.residency.states()}
    assert expected == {SMALL: ESTIMATE, LARGE: ESTIMATE}
    models.on_host(is_cpu=False)
    expected = {each.model: each.warm_bytes for each in models.residency.states()}

    assert expected == {SMALL: 394 * MIB, LARGE: 394 * MIB}


async def test_restarted_host_keeps_measured_sizes(
    tmp_path: Path, telemetry: EngineTelemetry
) -> None:
    models = models_of(tmp_path, telemetry, warm_bytes=ESTIMATE)
    models.residency.measured(SMALL, 5)
    models.on_host(is_cpu=True)

    assert models.residency.states()[0].warm_bytes == 5


async def test_the_first_adapter_needs_another_engine(
    tmp_path: Path, telemetry: EngineTelemetry
) -> None:
    """An engine that is started with adapters has room for others."""
    models = models_of(tmp_path, telemetry, warm_bytes=0)
    host: Any = Host(0)
    adapted = msgspec.structs.replace(entry(SMALL, tmp_path), adapters={"sql": "/adapters/sql"})
    assert not models.lacks_room(adapted), "no engine has been started"

    await models.activate(SMALL, host)
    assert models.lacks_room(adapted)
    assert not models.lacks_room(entry(SMALL, tmp_path))
    models.forget((SMALL,))
    models.replace(adapted)
    await models.activate(SMALL, host)
    models.replace(entry(SMALL, tmp_path))
    assert not models.lacks_room(adapted), "the engine keeps its room"
