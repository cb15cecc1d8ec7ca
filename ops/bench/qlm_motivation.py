"""QLM's motivation: waiting times of requests, and costs of eviction and swap-out (Figs 3, 4)."""

from typing import Any

import numpy as np

from ops.sim.mesh.engine import BatchEngine
from ops.sim.mesh.kinds import A100, LLAMA_70B, MISTRAL_7B, VICUNA_13B, ModelKind, served
from ops.sim.mesh.limits import BatchLimits
from ops.sim.mesh.request import MeshRequest
from ops.sim.mesh.sight import coefficients_of
from ops.sim.mesh.workload import MeshTraffic
from shared.contracts.base import ModelName
from solver.planning.lso.evict_or_swap import KvCosts, evict_or_swap

KINDS: tuple[ModelKind, ...] = (MISTRAL_7B, VICUNA_13B, LLAMA_70B)
_QUEUE = 2000
_CONTEXT_TOKENS = 1000
_HOST_BYTES = 1 << 40


def waiting_is_linear(seed: int) -> dict[str, float]:
    """
    R2 of a linear fit of the wait over the position in the queue, by model.

    Source: QLM Fig. 3. All requests arrive at once at one A100: first come, first served.
    """
    only = ModelName("only")
    traffic = MeshTraffic(models={only: 1.0}, rate_rps=1.0, duration_s=0.1, queue=_QUEUE, seed=seed)
    arrivals = [each.arrival for each in traffic.arrivals()]
    found = {}
    for kind in KINDS:
        how = served(kind, A100)
        assert how is not None
        engine = BatchEngine(how.latency, BatchLimits(kv_capacity_tokens=how.kv_capacity_tokens))
        requests = [MeshRequest(n, arrival, only) for n, arrival in enumerate(arrivals)]
        for request in requests:
            engine.add(request, 0.0)
        while engine.num_unfinished:
            engine.iterate()
        waits = np.array([request.first_token_at for request in requests], dtype=np.float64)
        found[kind.name] = float(np.corrcoef(np.arange(len(waits)), waits)[0, 1] ** 2)
    return found


def eviction_and_swap() -> dict[str, dict[str, Any]]:
    """Time to recompute and time to restore the KV of a run with a thousand tokens, by model."""
    made: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        how = served(kind, A100)
        assert how is not None
        costs = KvCosts(
            latency=coefficients_of(how),
            bytes_per_token=kind.kv_bytes_per_token,
            transfer_bytes_per_s=A100.host_link_bytes_per_s,
            host_checkpoints=True,
        )
        verdict = evict_or_swap(costs, context_tokens=_CONTEXT_TOKENS, host_free_bytes=_HOST_BYTES)
        made[f"4, {_CONTEXT_TOKENS} tokens: {kind.name}"] = {
            "again ms": round(1000 * verdict.recompute_s, 1),
            "back ms": round(1000 * verdict.transfer_s, 1),
            "host MB": round(verdict.host_bytes / 1e6),
            "choice": verdict.choice.value,
        }
    return made
