"""The events that the simulated engine reports at its death."""

import pytest

from ops.sim.virtual_time import LoopClock
from services.agent.backends.base import EngineEvent, EngineLost, EngineRequest, RunEnded
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.backend import SimulatedEngine
from shared.contracts.base import ModelName, RequestId
from shared.contracts.errors import EngineError
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Sampling

pytestmark = pytest.mark.virtual_time

ENTRY = ModelEntry(name=ModelName("m"), path="", architecture="", max_model_len=1024)
CRASH = 7


def request(name: str, token: int) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name), model=ENTRY.name, prompt=(token,), sampling=Sampling()
    )


async def test_death_precedes_the_ends_of_the_runs():
    """Otherwise an agent would submit the next request to the dead engine."""
    settings = SimulatedSettings(cold_activation_s=0.0, crash_on_token=CRASH)
    engine = SimulatedEngine([ENTRY], settings, LoopClock())
    events: list[EngineEvent] = []
    engine.listen(events.extend)
    await engine.start()
    await engine.activate(ENTRY.name)
    for name in ("a", "b"):
        engine.submit(request(name, 10))
    with pytest.raises(EngineError, match="injected"):
        engine.submit(request("c", CRASH))

    assert isinstance(events[0], EngineLost)
    assert [each.request_id for each in events if isinstance(each, RunEnded)] == ["a", "b"]
    assert not engine.alive
