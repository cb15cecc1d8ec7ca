"""Profile of a model on a device, measured with a batch (QLM §6, hardware profiling)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ops.sim.mesh.engine import BatchEngine
from ops.sim.mesh.kinds import Fleet, Served
from ops.sim.mesh.limits import BatchLimits, BatchTotals
from ops.sim.mesh.request import MeshRequest
from ops.sim.request import Arrival
from shared.contracts.base import ModelName
from solver.planning.problem.grouping import Spread
from solver.planning.problem.snapshot import ServiceRates

_SAMPLE = 768
"""Number of requests in the batch from which a profile is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured profile of one model on one kind of device."""

    rates: ServiceRates
    average_batch: float


def measured(
    fleet: Fleet, arrivals: Mapping[ModelName, Sequence[Arrival]], *, max_running: int
) -> dict[tuple[str, ModelName], Measured]:
    """
    Profiles by device and model. Each profile is measured on an engine that serves the model's
    first requests, all of which wait at the start.

    Args:
        fleet: Models and devices to profile.
        arrivals: Arrivals by model; models of a kind share one profile from all their requests.
        max_running: Limit of running requests of every engine.
    """
    samples: dict[str, list[Arrival]] = {}
    for model, of_model in arrivals.items():
        samples.setdefault(fleet.models[model].name, []).extend(of_model[:_SAMPLE])
    found: dict[tuple[str, ModelName], Measured] = {}
    known: dict[tuple[str, str], Measured] = {}
    for device in sorted(set(fleet.devices), key=lambda each: each.name):
        for model in fleet.fitting(device):
            kind = fleet.models[model].name
            how, sample = fleet.served(device, model), samples.get(kind, [])
            if how is None or not sample:
                continue
            if (device.name, kind) not in known:
                stride = max(1, len(sample) // _SAMPLE)
                known[device.name, kind] = _profiled(how, sample[::stride], max_running)
            found[device.name, model] = known[device.name, kind]
    return found


def _profiled(how: Served, sample: Sequence[Arrival], max_running: int) -> Measured:
    limits = BatchLimits(kv_capacity_tokens=how.kv_capacity_tokens, max_running=max_running)
    totals = BatchTotals()
    engine = BatchEngine(how.latency, limits, totals)
    requests = [
        MeshRequest(number, arrival, ModelName("profiled")) for number, arrival in enumerate(sample)
    ]
    for request in requests:
        engine.add(request, 0.0)
    batches: list[int] = []
    while engine.num_waiting:
        engine.iterate()
        batches.append(engine.num_running)
    tokens_per_s = (totals.tokens - totals.wasted_tokens) / engine.now
    pace_s = engine.now / max(1, len(batches))
    return Measured(
        rates=ServiceRates(
            token_rate_per_s=tokens_per_s,
            prefill_s=Spread(2 * pace_s, pace_s),
            decode_s_per_token=pace_s,
        ),
        average_batch=float(np.mean(batches)),
    )
