"""
LLM serving operations on real vLLM: what each costs, and what it gains.

Arms take turns; where the wall clock says more of the machine than of us, CPU time of the
engine's thread is compared, over several engines of each arm. A quick run leaves that and the
stock cold start out.
"""

import tempfile
from pathlib import Path

from ops.bench import lso_activation, lso_checkpoints, lso_safepoints
from ops.bench.lso_engines import engines
from ops.bench.progress import say
from ops.bench.result import Result
from services.agent.backends.vllm.availability import vllm_unavailable_reason
from shared.contracts.errors import SettingsError
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one
) -> Result:
    """Measure restoring, activation, preemption between layers, and what they cost."""
    reason = vllm_unavailable_reason()
    if reason is not None:
        raise SettingsError(reason)
    result = Result(name="lso", seed=seed, quick=quick)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as directory:
        registry = ModelRegistry.load(make_tiny_models(Path(directory, "tiny")))
        tiny = [registry.entry(name) for name in registry.bases]
        async with engines(Path(directory, "deep"), tiny) as engine:
            say("restoring against computing again")
            await lso_checkpoints.restoring(engine, result, quick=quick)
            say("what copying KV costs")
            await lso_checkpoints.COPYING.measure(engine, result, quick=quick)
            say("first tokens beside a large prefill")
            await lso_safepoints.first_tokens(engine, result, seed=seed, quick=quick)
            say("what safepoints cost")
            await lso_safepoints.OVERHEAD.measure(engine, result, quick=quick)
            say("activation paths")
            stock = registry.entry(lso_activation.LLAMA)
            await lso_activation.measure(engine, result, stock, quick=quick)
    return result
