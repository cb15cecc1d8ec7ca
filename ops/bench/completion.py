"""
Waiting and completion times predicted for groups before they are served (QLM §6).

Engines are simulated in virtual time, or run in a mesh of real processes over RabbitMQ.
Predictions begin with the lengths of earlier requests and one batch; then they learn from
telemetry and from the outcomes of forecasts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ops.bench.completion_forecasts import PassedGroup, accuracy, figures_of
from ops.bench.completion_load import MeshSize
from ops.bench.completion_mesh import serve
from ops.bench.completion_simulated import Load
from ops.bench.progress import say
from ops.bench.result import Line, Result
from ops.environment import engine_for
from ops.sim.mesh.kinds import A10, A100, MISTRAL_7B, VICUNA_13B, DeviceKind, ModelKind
from shared.contracts.base import Seconds

LENGTHS = (64, 128, 256, 512, 1024, 2048)
"""Queue lengths at which waits are predicted, in requests."""
SERVED: tuple[tuple[ModelKind, DeviceKind], ...] = (
    (MISTRAL_7B, A100), (VICUNA_13B, A100), (MISTRAL_7B, A10),
)  # fmt: skip
LEAST_R2 = 0.95
LEVEL, COVERAGE_OFF = 0.9, 0.03
LEAST_GROUPS, LEAST_LENGTHS = 300, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """Amount of simulated work of a full or quick run."""

    mesh_groups: int
    """Number of request groups of each model in the mesh."""
    mesh_s: Seconds
    """Time after which no more groups arrive in the mesh."""
    mesh_lengths: Sequence[int]
    """
    Queue lengths in the mesh, in requests; short, because requests that wait at the end are also
    served.
    """
    rounds: int
    """Number of rounds; each round measures every queue length once, in random order."""
    groups: int = 4
    """Consecutive groups at one queue length; errors of consecutive groups are correlated."""


QUICK = _Size(rounds=12, mesh_groups=60, mesh_s=14.0, mesh_lengths=(8, 16, 24, 32, 48))
FULL = _Size(rounds=60, mesh_groups=168, mesh_s=1500.0, mesh_lengths=(16, 32, 64, 128, 256))


async def run(*, seed: int, quick: bool, broker: str | None, engine: str | None = None) -> Result:
    """
    Run the benchmark: predict, serve, compare.

    Args:
        seed: Seed of the traffic.
        quick: Smaller; the mesh then has simulated engines unless *engine* is given.
        broker: As for `ops.environment.broker_for`.
        engine: Engine of the mesh, `vllm` or `simulated`; None: vLLM where it can run.
    """
    result = Result(name="completion", seed=seed, quick=quick)
    size = QUICK if quick else FULL
    backend, line = engine_for("simulated" if quick and engine is None else engine)
    say(line)
    _simulated(result, size, seed)
    await _mesh(result, size, seed=seed, broker=broker, engine=backend)
    return result


async def _mesh(result: Result, size: _Size, *, seed: int, broker: str | None, engine: str) -> None:
    outcome = await serve(
        broker,
        engine=engine,
        load=MeshSize(lengths=size.mesh_lengths, groups=size.mesh_groups, most_s=size.mesh_s),
        seed=seed,
    )
    learnt = [each for each in outcome.passed if each.forecast.learnt]
    judged = [each for each in outcome.quiet if each.forecast.learnt]
    name = f"mesh, {engine}"
    say(
        f"{name}: {len(learnt)} groups, {len(judged)} of them while other processes computed little"
    )
    result.figures[f"{name}, CPU of other processes"] = outcome.others_share
    for groups, which in ((judged, ""), (learnt, ", at any load of other processes")):
        if groups:
            figures = figures_of(groups).items()
            result.figures |= {f"{name}, {part}{which}": of for part, of in figures}
    if outcome.by_mesh:
        predicted = accuracy(outcome.by_mesh)
        shown = ("R2", "in the 90 % interval", "predicted / actual")
        result.figures[f"{name}, waiting as its groupers predicted {len(outcome.by_mesh)}"] = {
            key: predicted[key] for key in shown
        }
    lines = _lines(name, judged)
    if size is QUICK:
        lines = [replace(line, value=None) for line in lines]
    # Intervals are reported without a bound here, because times include other load of the machine.
    result.lines += [*lines, Line(name=f"lost requests, {name}", value=outcome.lost, bound=0)]


def _simulated(result: Result, size: _Size, seed: int) -> None:
    judged: list[PassedGroup] = []
    for model, device in SERVED:
        load = Load(model, device, seed=seed)
        order = np.random.default_rng(seed)
        for _ in range(size.rounds):
            for queue_length in order.permutation(LENGTHS).tolist():
                load.keep(queue_length, groups=size.groups)
        load.drain()
        passed = _calibrated(load.forecaster.passed)
        judged += passed
        name = f"simulated {model.name} on {device.name}"
        say(f"{name}: {len(passed)} groups")
        result.figures |= {f"{name}, {part}": values for part, values in figures_of(passed).items()}
    figures = figures_of(judged)
    result.figures |= {f"simulated, {part}": values for part, values in figures.items()}
    result.figures["simulated, waiting, by queue length"] = _by_length(judged)
    off = abs(figures["waiting"]["in the 90 % interval"] - LEVEL)
    result.lines += [
        *_lines("simulated", judged),
        Line(
            name=f"coverage of waiting times off {LEVEL:g}, simulated",
            value=off,
            bound=COVERAGE_OFF,
        ),
    ]


def _calibrated(passed: Sequence[PassedGroup]) -> list[PassedGroup]:
    """Request groups whose forecasts were calibrated by the outcomes of earlier groups."""
    return [each for each in passed if each.forecast.corrected]


def _by_length(passed: Sequence[PassedGroup]) -> dict[str, float]:
    """Share of waiting times within their predicted 90 % interval, by queue length."""
    found = {}
    for length in sorted({each.forecast.queue_length for each in passed}):
        of = [each for each in passed if each.forecast.queue_length == length]
        found[str(length)] = figures_of(of)["waiting"]["in the 90 % interval"]
    return found


def _lines(name: str, judged: Sequence[PassedGroup]) -> list[Line]:
    missed = 1 - figures_of(judged)["waiting"]["R2"] if judged else None
    lengths = {each.forecast.queue_length for each in judged}
    return [
        Line(name=f"{LEAST_GROUPS} - groups, {name}", value=LEAST_GROUPS - len(judged), bound=0),
        Line(
            name=f"{LEAST_LENGTHS} - queue lengths, {name}",
            value=LEAST_LENGTHS - len(lengths),
            bound=0,
        ),
        Line(name=f"1 - R2 of waiting times, {name}", value=missed, bound=1 - LEAST_R2),
    ]
