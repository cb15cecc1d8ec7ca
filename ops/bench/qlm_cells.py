"""One simulation of QLM's benchmark: traffic, instances and system."""

import math
from functools import cache
from typing import Any

import msgspec

from ops.bench.store import Figures
from ops.sim.mesh.arms import ARMS
from ops.sim.mesh.cluster import MeshOptions, simulate_mesh
from ops.sim.mesh.kinds import A10, A100, MISTRAL_7B, Fleet, ModelKind
from ops.sim.mesh.profiling import measured
from ops.sim.mesh.summary import summarize_mesh
from ops.sim.mesh.workload import MeshTraffic, many_models
from ops.sim.request import Arrival
from shared.contracts.base import ModelName, Seconds
from solver.planning.search.loading import compile_kernels

MAX_RUNNING = 128
NUM_FREQUENT, NUM_TAIL = 4, 8
"""Numbers of frequently and rarely used models (QLM §8: more than half are rarely used)."""
_SAMPLE_S = 60.0
_SAMPLE_RPS = 20.0


class MeshCell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one simulation; equal cells of equal code give equal figures."""

    workload: str = "A"
    """
    Workload `A`: twelve models of three sizes; `7B`: twelve models of one size; `B`: one model.
    """
    arm: str = "qlm"
    load: float = 0.3
    """
    Offered work, as a share of the instances' capacity without any swap.

    This capacity is computed from the profile, so that it is known before any system runs.
    """
    instances: int = 6
    a10: int = 0
    """Number of A10 GPUs among the instances."""
    interactive: float = 0.25
    mega: float = 0.0
    tail: float = 0.3
    """Ratio of arrivals for all rarely used models to arrivals for all frequently used models."""
    queue: int = 0
    """Number of batch requests that wait at the start."""
    slo_scale: float = 1.0
    swap_scale: float = 1.0
    """
    Scale factor of the swap times; with 1, warm models take 1, 1.8 and 6 s, with 5 five times as
    long.
    """
    delta: float = 4.0
    duration_s: Seconds = 150.0
    stops: bool = False
    """
    True: the simulation ends with the last arrival. False: the simulation ends when all requests
    are served.
    """
    seed: int = 0

    def models(self) -> tuple[dict[ModelName, ModelKind], dict[ModelName, float]]:
        """Kind of each model, and its share of the arrivals."""
        if self.workload == "A":
            return many_models(NUM_FREQUENT, NUM_TAIL, self.tail)
        if self.workload == "7B":
            return many_models(NUM_FREQUENT, NUM_TAIL, self.tail, sizes=(MISTRAL_7B,))
        return {ModelName("only"): MISTRAL_7B}, {ModelName("only"): 1.0}

    def fleet(self) -> Fleet:
        """Instances and models of the simulation, A100s first."""
        devices = (A100,) * (self.instances - self.a10) + (A10,) * self.a10
        return Fleet(devices=devices, models=self.models()[0], swap_scale=self.swap_scale)

    def traffic(self) -> MeshTraffic:
        """Traffic at the request rate that gives the load `load`."""
        return MeshTraffic(
            models=self.models()[1],
            rate_rps=self.load * _capacity_rps(self._size()),
            duration_s=self.duration_s,
            interactive=self.interactive,
            mega=self.mega,
            slo_scale=self.slo_scale,
            queue=self.queue,
            seed=self.seed,
        )

    def _size(self) -> "MeshCell":
        """Copy of the cell with only the fields that determine the capacity."""
        return MeshCell(
            workload=self.workload, instances=self.instances, a10=self.a10, mega=self.mega,
            tail=self.tail,
        )  # fmt: skip


def measure_mesh(cell: MeshCell) -> dict[str, Any]:
    """Simulate the cell; return JSON-able figures."""
    _loaded()
    arm, fleet = ARMS[cell.arm], cell.fleet()
    options = MeshOptions(
        fleet=fleet,
        conduct=arm.conduct,
        planner=arm.planner(cell.seed, cell.delta),
        max_running=MAX_RUNNING,
        until_s=cell.duration_s if cell.stops else math.inf,
    )
    outcome = simulate_mesh(cell.traffic().arrivals(), options)
    return summarize_mesh(
        outcome, num_instances=len(fleet.devices), duration_s=max(1.0, cell.duration_s)
    )


@cache
def _loaded() -> None:
    compile_kernels()


@cache
def _capacity_rps(cell: MeshCell) -> float:
    """Requests per second that the instances could serve if swaps took no time."""
    kinds, shares = cell.models()
    fleet = cell.fleet()
    sample = MeshTraffic(
        models=shares, rate_rps=_SAMPLE_RPS, duration_s=_SAMPLE_S, mega=cell.mega
    ).arrivals()
    by_model: dict[ModelName, list[Arrival]] = {model: [] for model in kinds}
    for each in sample:
        by_model[each.model].append(each.arrival)
    profiles = measured(fleet, by_model, max_running=MAX_RUNNING)
    tokens = [each.arrival.prompt_tokens + each.arrival.output_tokens for each in sample]
    per_request = sum(tokens) / len(tokens)
    total = 0.0
    for device in fleet.devices:
        rates = {
            model: profiles[device.name, model].rates.token_rate_per_s
            for model in fleet.fitting(device)
        }
        served = sum(shares[model] for model in rates)
        seconds = math.fsum(shares[m] * per_request / rate for m, rate in rates.items())
        total += served / seconds
    return total


MeshFigures = dict[MeshCell, Figures]
