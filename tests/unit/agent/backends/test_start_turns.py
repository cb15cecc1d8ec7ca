"""Engine hosts of one machine start in turn."""

import asyncio
from pathlib import Path

import pytest

from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front import link
from services.agent.backends.vllm.front.link import HostLink
from services.agent.backends.vllm.front.start_turn import StartTurn
from shared.contracts.errors import EngineError

pytestmark = pytest.mark.virtual_time


async def test_a_start_waits_until_a_place_is_free(tmp_path: Path):
    first = await StartTurn.taken(tmp_path, places=2)
    await StartTurn.taken(tmp_path, places=2)
    third = asyncio.create_task(StartTurn.taken(tmp_path, places=2))
    await asyncio.sleep(100.0)
    waited = not third.done()
    first.end()
    first.end()
    await asyncio.wait_for(third, 1.0)

    assert waited


async def test_a_host_that_does_not_start_leaves_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    turns: list[StartTurn] = []

    async def taken() -> StartTurn:
        turns.append(await original(tmp_path, places=1))
        return turns[-1]

    original = StartTurn.taken
    monkeypatch.setattr(link.StartTurn, "taken", taken)
    for _ in range(2):
        with pytest.raises(EngineError, match="cannot start the engine host"):
            await HostLink.launch(
                VllmSettings(python=str(tmp_path / "absent")),
                architectures=(),
                scratch=tmp_path,
                on_event=lambda _event: None,
                on_lost=lambda _message: None,
            )

    assert len(turns) == 2
