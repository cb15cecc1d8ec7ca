"""Simulated engine cores, and their answers until all requests have ended."""

from typing import Any

from services.agent.backends.base import EngineRequest
from services.agent.backends.settings import SimulatedSettings
from services.agent.backends.simulated.core import SimulatedEngineCore
from shared.contracts.base import ModelName, RequestId
from shared.contracts.models import ModelEntry
from shared.contracts.requests import Sampling
from shared.contracts.telemetry import EngineIteration
from solver.scheduling.baselines import FixedChunkFcfs

ENTRY = ModelEntry(
    name=ModelName("m"), path="", architecture="", max_model_len=1024, eos_token_ids=(2, 3)
)


def core_of(**fields: Any) -> SimulatedEngineCore:
    settings = SimulatedSettings(**({"kv_capacity_tokens": 4096} | fields))
    return SimulatedEngineCore(ENTRY, settings, FixedChunkFcfs(settings.token_budget))


def request(name: str, length: int = 32, max_tokens: int = 8, **fields: Any) -> EngineRequest:
    sampling = {"temperature": 0, "ignore_eos": True} | fields.pop("sampling", {})
    first = 10 + sum(name.encode()) % 100
    return EngineRequest(
        request_id=RequestId(name),
        model=ENTRY.name,
        prompt=tuple(range(first, first + length)),
        sampling=Sampling(max_tokens=max_tokens, **sampling),
        **fields,
    )


def drain(core: SimulatedEngineCore) -> tuple[dict[str, list[int]], list[EngineIteration]]:
    """Run the core until no request is left; return every request's tokens and all iterations."""
    answers: dict[str, list[int]] = {}
    iterations = []
    while core.num_running + core.num_waiting:
        result = core.iterate(0.0)
        assert result.iteration is not None
        iterations.append(result.iteration)
        for output in result.outputs:
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    return answers, iterations


def alone(a_request: EngineRequest) -> list[int]:
    core = core_of()
    core.add(a_request)
    return drain(core)[0][a_request.request_id]
