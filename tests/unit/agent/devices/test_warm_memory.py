"""Host memory of an agent for warm models."""

from pathlib import Path

import pytest

from services.agent.backends.settings import VllmSettings
from services.agent.devices import warm_memory
from services.agent.devices.found import VISIBLE, Device
from shared.contracts.errors import SettingsError
from shared.models import host_memory

GIB = 1 << 30
FOUR = tuple(Device(str(n), n, f"GPU-{n}", "H200", 140 * GIB) for n in range(4))


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(warm_memory, "available_host_bytes", lambda **_: 800 * GIB)


@pytest.mark.parametrize(("visible", "expected_gib"), [("0", 100), ("0,1", 200), (None, 400)])
def test_an_agent_has_the_part_of_its_gpus_of_half_of_the_host_memory(
    visible: str | None, expected_gib: int
) -> None:
    settings = VllmSettings(environment={} if visible is None else {VISIBLE: visible})

    assert warm_memory.warm_bytes_of(settings, lambda: FOUR) == expected_gib * GIB


def test_without_gpus_it_is_half_of_the_host_memory() -> None:
    assert warm_memory.warm_bytes_of(VllmSettings(), lambda: ()) == 400 * GIB


def test_the_setting_goes_first() -> None:
    assert warm_memory.warm_bytes_of(VllmSettings(warm_bytes=7), lambda: FOUR) == 7


def test_memory_that_cannot_be_read_is_an_error_that_names_the_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(host_memory, "_HOST", tmp_path / "meminfo")

    with pytest.raises(SettingsError, match=r"engine\.vllm\.warm_bytes"):
        warm_memory.warm_bytes_of(VllmSettings(), lambda: ())
