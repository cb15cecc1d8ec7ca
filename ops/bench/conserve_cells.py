"""Simulations of the ConServe benchmark and their targets."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec

from ops.sim.checkpoints import CheckpointingReplica
from ops.sim.engine import SimulatedReplica
from ops.sim.limits import EngineLimits
from ops.sim.offline import BURST_GPT, DATASETS, CoServing
from ops.sim.policies import policy_factory
from ops.sim.profiles import NamedProfile, load
from ops.sim.safepoints import LayerwiseReplica
from shared.contracts.base import Seconds
from shared.contracts.qos import Slo
from solver.scheduling.engine.decision import SchedulingPolicy

TTFT_SCALE, TBT_SCALE = 1.25, 1.19
"""
Ratio of the targets to online-only P99. ConServe meets its targets at all rates (§6.2).

The paper derives the targets from online-only P99 and does not state the factor of Fig. 6a.
"""
REFERENCE_RPS = 2.0
"""
Request rate of ConServe's figures 3 and 8; at lower rates, targets derive from online-only P99 at
this rate.
"""
CHUNK_TOKENS = 2048
"""Chunk size of the baselines in tokens (ConServe §4.4 mentions full 2048-token chunks)."""

Builder = Callable[[NamedProfile], SimulatedReplica]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """
    One simulated traffic that several systems serve; equal cells of equal code give equal figures.
    """

    figure: str
    systems: tuple[str, ...]
    rate_rps: float = REFERENCE_RPS
    variation: float = 0.5
    prompt_tokens: int = 4096
    output_tokens: int = 256
    burst_gpt: bool = False
    """True: requests have the lengths of the data set BurstGPT."""
    datasets: tuple[str, ...] = tuple(DATASETS)
    scale: float | None = None
    """Scale factor of the TTFT and TBT targets; None: `TTFT_SCALE` and `TBT_SCALE`."""
    seed: int = 0
    duration_s: Seconds = 300.0

    def traffic(self, slo: Slo) -> CoServing:
        """The traffic of the cell, with targets for the online requests."""
        prompt, output = BURST_GPT if self.burst_gpt else (self.prompt_tokens, self.output_tokens)
        return CoServing(
            rate_rps=self.rate_rps,
            variation=self.variation,
            prompt=prompt,
            output=output,
            slo=slo,
            datasets=self.datasets,
            duration_s=self.duration_s,
            seed=self.seed,
        )


def _plain(policy: str) -> Builder:
    return lambda profile: SimulatedReplica(
        _policy(policy, profile), profile.latency, _limits(profile)
    )


def _layerwise(policy: str, patience: float) -> Builder:
    return lambda profile: LayerwiseReplica(
        _policy(policy, profile), profile.latency, _limits(profile), patience=patience
    )


def _checkpointing(policy: str, patience: float) -> Builder:
    return lambda profile: CheckpointingReplica(
        _policy(policy, profile), profile.latency, _limits(profile), patience=patience
    )


def _policy(name: str, profile: NamedProfile) -> SchedulingPolicy:
    return policy_factory(name)(profile.latency)


def _limits(profile: NamedProfile) -> EngineLimits:
    return EngineLimits(kv_capacity_tokens=profile.kv_capacity_tokens)


SYSTEMS: dict[str, Builder] = {
    "non-preemptive": _plain(f"non-preemptive:{CHUNK_TOKENS}"),
    "sarathi-p": _plain(f"sarathi-preemptive:{CHUNK_TOKENS}"),
    "alg. 1": _plain("conserve"),
    "alg. 1, layers": _layerwise("conserve", 1.0),
    "alg. 1, layers, checkpoints": _checkpointing("conserve", 1.0),
    "ours": _plain("conserve+admission"),
    "ours, layers": _layerwise("conserve+admission", 1.0),
    "ours, eager": _layerwise("conserve+admission", 0.0),
    "ours, eager, checkpoints": _checkpointing("conserve+admission", 0.0),
}
"""
Systems by name.

`alg. 1` is the paper's scheduler; `ours` also limits how much offline work begins. `layers`
preempts at a safepoint when algorithm 2 predicts a late first token; `eager` preempts at every
online arrival. `checkpoints` adds KV checkpoints.
"""
ALL = tuple(SYSTEMS)
JUDGED = ("non-preemptive", "sarathi-p", "ours")
WHOLE = "ours, eager, checkpoints"


def measure(cell: Cell) -> dict[str, dict[str, Any]]:
    """JSON-able figures of each system, and of the online requests alone."""
    profile = load("h100")
    alone = _online_only(_without_offline(cell))
    least = _online_only(Cell(figure="", systems=(), seed=cell.seed, duration_s=cell.duration_s))
    ttft_ms = max(alone["ttft_p99_ms"], least["ttft_p99_ms"])
    tbt_ms = max(alone["tbt_p99_ms"], least["tbt_p99_ms"])
    slo = Slo(
        ttft_s=1e-3 * ttft_ms * (cell.scale or TTFT_SCALE),
        tbt_s=1e-3 * tbt_ms * (cell.scale or TBT_SCALE),
    )
    made = {"online-only": alone}
    for system in cell.systems:
        made[system] = cell.traffic(slo).run(SYSTEMS[system](profile)).figures()
    return made


def _without_offline(cell: Cell) -> Cell:
    """Copy of *cell* with only the fields that determine its online-only run."""
    return msgspec.structs.replace(cell, figure="", systems=(), datasets=(), scale=None)


@cache
def _online_only(cell: Cell) -> dict[str, Any]:
    profile = load("h100")
    traffic = replace(cell.traffic(Slo(ttft_s=1.0, tbt_s=1.0)), datasets=())
    return traffic.run(_plain(f"sarathi-fcfs:{CHUNK_TOKENS}")(profile)).figures()


def judged(seed: int) -> list[Cell]:
    """Cells that have an acceptance line: three seeds at 2 requests per second."""
    return [Cell(figure="judged", systems=(*JUDGED, WHOLE), seed=seed + k) for k in range(3)]


def printed(seed: int) -> list[Cell]:
    """Cells that have no acceptance line."""
    cells = [
        Cell(figure="6a", systems=ALL, rate_rps=rate, seed=seed)
        for rate in (0.5, 1.0, 2.0, 3.0, 4.0)
    ]
    cells += [
        Cell(figure="6b", systems=("non-preemptive", "ours"), scale=scale, seed=seed)
        for scale in (1.0, 1.1, 1.25, 1.5, 2.0)
    ]
    cells += [
        Cell(figure="8a", systems=JUDGED, variation=variation, seed=seed)
        for variation in (0.25, 0.5, 1.0, 2.0)
    ]
    cells += [
        Cell(figure="8b", systems=JUDGED, prompt_tokens=prompt,
             rate_rps=REFERENCE_RPS * 4096 / prompt, seed=seed)
        for prompt in (1024, 2048, 4096, 8192, 16384)
    ]  # fmt: skip
    cells += [
        Cell(figure="8c", systems=JUDGED, output_tokens=output,
             rate_rps=REFERENCE_RPS * 256 / output, seed=seed)
        for output in (64, 128, 256, 512, 1024)
    ]  # fmt: skip
    cells += [
        Cell(figure="table 2", systems=JUDGED, burst_gpt=True, datasets=datasets, seed=seed)
        for datasets in (tuple(DATASETS), *((name,) for name in DATASETS))
    ]
    return cells
