"""
Waiting and completion times that are foretold for groups before they are served (QLM §6).

Simulated engines in virtual time, and a mesh of real processes over RabbitMQ. Each knows lengths
of earlier requests and one batch at first, and learns from telemetry and from what came of its
forecasts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ops.bench.completion_forecasts import PassedGroup, figures_of
from ops.bench.completion_simulated import Load
from ops.bench.progress import say
from ops.bench.result import Line, Result
from ops.sim.mesh.kinds import A10, A100, MISTRAL_7B, VICUNA_13B, DeviceKind, ModelKind

LENGTHS = (64, 128, 256, 512, 1024, 2048)
"""Of the queue, in requests."""
SERVED: tuple[tuple[ModelKind, DeviceKind], ...] = (
    (MISTRAL_7B, A100), (VICUNA_13B, A100), (MISTRAL_7B, A10),
)  # fmt: skip
LEAST_R2 = 0.95
LEVEL, COVERAGE_OFF = 0.9, 0.03
LEAST_GROUPS, LEAST_LENGTHS = 300, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """How much is simulated."""

    rounds: int
    """In each, the queue has every length once, in any order."""
    groups: int = 4
    """That come at one length before the next: those of one block err alike."""


QUICK = _Size(rounds=16)
FULL = _Size(rounds=60)


async def run(
    *,
    seed: int,
    quick: bool,
    broker: str | None,  # noqa: ARG001 - nothing here needs one yet
) -> Result:
    """Foretell, serve, compare."""
    result = Result(name="completion", seed=seed, quick=quick)
    _simulated(result, QUICK if quick else FULL, seed)
    return result


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
    result.lines += _lines("simulated", judged)


def _calibrated(passed: Sequence[PassedGroup]) -> list[PassedGroup]:
    """Groups that were foretold when enough others had passed to be learnt from."""
    return [each for each in passed if each.forecast.corrected]


def _by_length(passed: Sequence[PassedGroup]) -> dict[str, float]:
    """Share of waits in the 90 % interval."""
    found = {}
    for length in sorted({each.forecast.queue_length for each in passed}):
        of = [each for each in passed if each.forecast.queue_length == length]
        found[str(length)] = figures_of(of)["waiting"]["in the 90 % interval"]
    return found


def _lines(name: str, judged: Sequence[PassedGroup]) -> list[Line]:
    waiting = figures_of(judged)["waiting"]
    lengths = {each.forecast.queue_length for each in judged}
    return [
        Line(name=f"{LEAST_GROUPS} - groups, {name}", value=LEAST_GROUPS - len(judged), bound=0),
        Line(
            name=f"{LEAST_LENGTHS} - queue lengths, {name}",
            value=LEAST_LENGTHS - len(lengths),
            bound=0,
        ),
        Line(name=f"1 - R2 of waiting times, {name}", value=1 - waiting["R2"], bound=1 - LEAST_R2),
        Line(
            name=f"coverage of waiting times off {LEVEL:g}, {name}",
            value=abs(waiting["in the 90 % interval"] - LEVEL),
            bound=COVERAGE_OFF,
        ),
    ]
