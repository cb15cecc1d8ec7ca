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
from ops.bench.progress import say
from ops.bench.result import Result
from services.agent.backends.vllm.front.process import vllm_unavailable_reason
from shared.contracts.errors import SettingsError
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
) -> Result:
    """Run the benchmark: gain and cost of checkpoints, activation and preemption between layers."""
    reason = vllm_unavailable_reason()
    if reason is not None:
        raise SettingsError(reason)
    result = Result(name="lso", seed=seed, quick=quick)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
        registry = ModelRegistry.load(make_tiny_models(Path(directory, "tiny")))
        tiny = [registry.entry(name) for name in registry.bases]
        async with engines(Path(directory, "deep"), tiny) as engine:
            say("restoring against recomputing")
            await lso_checkpoints.restoring(engine, result, quick=quick)
            say("cost of copying KV")
            await lso_checkpoints.COPYING.measure(engine, result, quick=quick)
            say("first tokens beside a large prefill")
            await lso_safepoints.first_tokens(engine, result, seed=seed, quick=quick)
            say("cost of safepoints")
            await lso_safepoints.OVERHEAD.measure(engine, result, quick=quick)
            say("activation paths")
            stock = registry.entry(lso_activation.LLAMA)
            await lso_activation.measure(engine, result, stock, quick=quick)
    return result
