"""The arms of the engine benchmark: one model under stock vLLM and under Headway's policy."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ops.bench.engine_load import Planned, Served, serve
from ops.bench.given_model import given_model
from services.agent.backends.base import EngineBackend, SchedulingParameters
from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.backend import VllmEngine
from services.agent.backends.vllm.shared.schedulers import STOCK
from shared.contracts.base import ModelName, Seconds
from shared.contracts.models import ModelEntry
from shared.contracts.qos import Slo
from shared.models.registry import ModelRegistry
from shared.models.tiny import TINY_MODELS, make_tiny_models
from shared.models.tiny_weights import TinyArchitecture

BASE = ModelName("tiny-llama")
MAX_RUNNING = 64
LARGEST_BUDGET = 2048
FCFS, PRIORITY, OURS = ModelName("stock-fcfs"), ModelName("stock-priority"), ModelName("ours")
ENGINES: dict[ModelName, dict[str, str]] = {
    FCFS: {"scheduler_cls": STOCK},
    PRIORITY: {"scheduler_cls": STOCK, "scheduling_policy": "priority"},
    OURS: {},
}
"""The stock arms have vLLM's own scheduler, in a subclass of Headway that only records times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One arm of the benchmark: an engine and its settings."""

    model: ModelName
    token_budget: int
    """
    Chunk size of stock vLLM in tokens; upper limit of the chunks that Headway's policy chooses.
    """
    priorities: Mapping[str, int] = field(default_factory=dict)
    """
    Priority of each request class for stock vLLM's `priority` policy; smaller numbers are served
    first.
    """

    async def serve(
        self,
        engine: EngineBackend,
        load: list[Planned],
        slos: Mapping[str, Slo],
        *,
        patience_s: Seconds,
    ) -> list[Served]:
        """Serve *load* on the engine of this arm; other arms are idle."""
        await self.activate(engine)
        return await serve(
            engine, self.model, load, slos, priorities=self.priorities, patience_s=patience_s
        )

    async def activate(self, engine: EngineBackend) -> None:
        """Activate the engine of this arm, with its limits."""
        await engine.activate(self.model)
        await engine.set_scheduling(
            SchedulingParameters(token_budget=self.token_budget, max_running=MAX_RUNNING)
        )


@asynccontextmanager
async def engines(
    directory: Path,
    architecture: TinyArchitecture = TINY_MODELS[BASE],
    arms: Mapping[ModelName, Mapping[str, str]] = ENGINES,
    given: Path | None = None,
) -> AsyncIterator[VllmEngine]:
    """
    Open one backend with the engines of all arms; idle engines are parked. Engine output goes to a
    file.

    Args:
        directory: For models and output.
        architecture: The model of all arms.
        given: Folder of a model that all arms have instead.
        arms: Engine arguments of each arm, by the arm's model name.
    """
    if given is None:
        models = make_tiny_models(directory, models={BASE: architecture})
        base = ModelRegistry.load(models).entry(BASE)
    else:
        base = given_model(given, BASE)
    settings = VllmSettings(
        policy="qoserve",
        max_running=MAX_RUNNING,
        token_budget=LARGEST_BUDGET,
        warm_bytes=len(arms) << 30,
        # Arms get the same prompts and must not profit from an earlier run.
        prefix_caching=False,
        log_path=str(directory / "vllm.log"),
    )
    engine = VllmEngine(tuple(_variant(base, *each) for each in arms.items()), settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def _variant(base: ModelEntry, name: ModelName, arguments: Mapping[str, str]) -> ModelEntry:
    return msgspec.structs.replace(base, name=name, engine_args=base.engine_args | dict(arguments))
