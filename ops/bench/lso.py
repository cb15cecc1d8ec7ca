"""
LLM serving operations on real vLLM: cost and gain of each.

Arms alternate. Where wall-clock time depends more on the machine than on the code, the bench
compares CPU time of the engine's thread, over several engines of each arm. A quick run omits the
CPU times and the stock cold start.
"""

import tempfile
from pathlib import Path

from ops.bench import lso_activation, lso_checkpoints, lso_safepoints
from ops.bench.lso_engines import engines
from ops.bench.result import Result
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.contracts.telemetry import Capability
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
    model: Path | None = None,
) -> Result:
    """
    Run the benchmark: gain and cost of checkpoints, activation and preemption between layers.

    Mechanisms that the engine does not have on this device are not measured.
    """
    reason = vllm_unavailable_reason()
    if reason is not None:
        raise SettingsError(reason)
    result = Result(name="lso", seed=seed, quick=quick)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
        others = _tiny(Path(directory, "tiny")) if model is None else lso_activation.given(model)
        async with engines(Path(directory, "deep"), others, given=model) as engine:
            has = engine.identity.capabilities
            if Capability.CHECKPOINT in has:
                await lso_checkpoints.restoring(engine, result, quick=quick)
                await lso_checkpoints.COPYING.measure(engine, result, quick=quick)
            if Capability.LAYER_PREEMPTION in has:
                await lso_safepoints.first_tokens(engine, result, seed=seed, quick=quick)
                await lso_safepoints.OVERHEAD.measure(engine, result, quick=quick)
            await lso_activation.measure(engine, result, others[0], quick=quick)
    return result


def _tiny(directory: Path) -> list[ModelEntry]:
    """The tiny models; the first is that of the stock engine."""
    registry = ModelRegistry.load(make_tiny_models(directory))
    names = sorted(registry.bases, key=lambda name: name != lso_activation.LLAMA)
    return [registry.entry(name) for name in names]
