"""Batches with short windows under changing load: late ones, and errors of the expected end."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ops.bench.batch_mesh import Load, ask, batch_mesh, create, lines_of, loaded, polled
from ops.bench.result import Line, Result
from services.agent.backends.settings import SimulatedSettings
from shared.contracts.qos import Slo
from shared.producer.producer import Producer

WINDOWS_S = (60, 120, 240)
LINES_PER_S = (15.0, 30.0)
"""
Number of lines per second of the window: a quarter to a half of what the engines serve, so that a
batch runs for a good part of its window, through several changes of the load.
"""
MOST_ERRORS = {0.25: 0.20, 0.5: 0.15, 0.75: 0.10}
"""Part of a batch that has ended -> bound of the median error of its expected end."""


async def run(*, seed: int, quick: bool, broker: str | None) -> Result:
    """Run the benchmark on a private RabbitMQ node."""
    del broker  # the mesh of batches has its own
    result = Result(name="batch_windows", seed=seed, quick=quick)
    late, errors, random = 0, _Errors(), np.random.default_rng(seed)
    num_batches = 2 if quick else 20
    async with (
        batch_mesh(SimulatedSettings(max_running=16)) as rig,
        loaded(rig, _changing(random), _best_effort()),
    ):
        for number in range(num_batches):
            window_s = 20 if quick else WINDOWS_S[number % len(WINDOWS_S)]
            num_lines = int(window_s * random.uniform(*LINES_PER_S))
            batch_id = await create(rig, lines_of(num_lines, 32), f"{window_s}s")
            seen = [each | {"seen_at": time.time()} async for each in polled(rig, batch_id)]
            late += seen[-1]["status"] != "completed"
            errors.add(seen)
    result.figures |= {"batches with short windows": num_batches} | {
        f"median error of the expected end at {share:.0%}": errors.median(share)
        for share in MOST_ERRORS
    }
    result.lines.append(Line(name="batches that were late", value=float(late), bound=0.0))
    result.lines += [
        Line(
            name=f"median error of the expected end at {share:.0%}",
            value=None if quick else errors.median(share),
            bound=bound,
        )
        for share, bound in MOST_ERRORS.items()
    ]
    return result


@dataclass(slots=True)
class _Errors:
    """Errors of expected ends, as parts of the time that was left."""

    by_share: dict[float, list[float]] = field(
        default_factory=lambda: {share: [] for share in MOST_ERRORS}
    )

    def add(self, seen: list[dict[str, Any]]) -> None:
        """Add the errors of a batch that was *seen* several times until its end."""
        end_at = seen[-1]["seen_at"]
        for share, errors in self.by_share.items():
            for batch in seen[:-1]:
                counts, expected_at = batch["request_counts"], batch["headway"]["expected_at"]
                ended = counts["completed"] + counts["failed"]
                if counts["total"] and ended >= share * counts["total"]:
                    if expected_at is not None and end_at > batch["seen_at"]:
                        left_s = end_at - batch["seen_at"]
                        errors.append(abs(expected_at - end_at) / left_s)
                    break

    def median(self, share: float) -> float | None:
        errors = self.by_share[share]
        return float(np.median(errors)) if errors else None


def _changing(random: np.random.Generator) -> Load:
    """Phases of 5 to 20 s with little or much interactive load."""

    async def load(producer: Producer) -> AsyncIterator[None]:
        while True:
            rate_rps = float(random.choice([2.0, 15.0]))
            until = time.monotonic() + random.uniform(5.0, 20.0)
            while time.monotonic() < until:
                await ask(producer, slo=Slo(ttft_s=2.0, tbt_s=0.2))
                await asyncio.sleep(random.exponential(1 / rate_rps))
                yield

    return load


def _best_effort() -> Load:
    """More best effort than engines run at once."""

    async def load(producer: Producer) -> AsyncIterator[None]:
        while True:
            if producer.num_outstanding < 200:
                await ask(producer, slo=Slo(), max_tokens=64)
            else:
                await asyncio.sleep(0.1)
            yield

    return load
