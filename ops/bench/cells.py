"""Simulations that are kept once they were made, so that a long benchmark can be resumed."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ops.sim.profiles import load
from ops.sim.scenario import Scenario, Wave
from ops.sim.search import highest_rate, least_replicas
from ops.sim.summary import summarize, violation_share
from ops.sim.workload import CLASSES, TrafficClass, with_shares

ROOT = Path(__file__).parents[2]
SOURCES = ("ops/sim", "ops/bench/cells.py", "solver/scheduling", "solver/prediction/moments.py")
NOT_SIMULATED = {"arguments.py", "keys.py", "pulling.py", "relegation.py", "report.py", "window.py"}


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One simulation or search; equal cells of equal code give equal figures."""

    kind: str = "simulate"
    """`simulate`, `goodput` (highest rate with `allowed` violations) or `replicas` (fewest)."""
    profile: str = "28"
    policy: str = "qoserve+curve"
    rate_rps: float = 6.0
    hours: float = 4.0
    seed: int = 0
    replicas: int = 1
    shares: tuple[float, float, float] = (1, 1, 1)
    only_class: str | None = None
    """All traffic is of this class."""
    wave: tuple[float, float] | None = None
    low_share: float = 0.0
    lengths: str = "code"
    prefill_only: bool = False
    allowed: float = 0.01
    silo: tuple[tuple[str, str, int], ...] = ()

    def scenario(self) -> Scenario:
        """What it simulates."""
        return Scenario(
            profile=load(self.profile),
            policy=self.policy,
            replicas=self.replicas,
            silo=self.silo,
            rate_rps=self.rate_rps,
            duration_s=3600 * self.hours,
            lengths=self.lengths,
            wave=None if self.wave is None else Wave(low_rps=self.wave[0], high_rps=self.wave[1]),
            classes=self._classes(),
            low_share=self.low_share,
            prefill_only=self.prefill_only,
            seed=self.seed,
        )

    def _classes(self) -> tuple[TrafficClass, ...]:
        if self.only_class is None:
            return with_shares(self.shares)
        return tuple(replace(c, share=1.0) for c in CLASSES if c.name == self.only_class)


class Store:
    """
    Figures of cells on disk, by the cell and the digest of the code that made them.

    Args:
        directory: Holds a file a cell.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._digest = _code_digest()

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """The figures, if they were made."""
        file = self._file(cell)
        return msgspec.json.decode(file.read_bytes()) if file.exists() else None

    def put(self, cell: Cell, figures: dict[str, Any]) -> None:
        """Keep them."""
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = self._file(cell).with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(figures))
        partial.rename(self._file(cell))

    def _file(self, cell: Cell) -> Path:
        key = hashlib.blake2b(msgspec.json.encode(cell) + self._digest, digest_size=12)
        return self._directory / f"{key.hexdigest()}.json"


def measured(
    cells: Iterable[Cell], store: Store, *, workers: int | None = None
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """
    Figures of each cell, as they come.

    Args:
        cells: Made in this order, except those that are in the store.
        store: Gets what is made.
        workers: Processes; none is one per core.
    """
    missing = []
    for cell in dict.fromkeys(cells):
        figures = store.get(cell)
        if figures is None:
            missing.append(cell)
        else:
            yield cell, figures
    if not missing:
        return
    with ProcessPoolExecutor(max_workers=workers or os.cpu_count()) as pool:
        made = {pool.submit(measure, cell): cell for cell in missing}
        for future in as_completed(made):
            store.put(made[future], future.result())
            yield made[future], future.result()


def measure(cell: Cell) -> dict[str, Any]:
    """Simulate or search; JSON-able."""
    scenario = cell.scenario()
    if cell.kind == "goodput":
        rate_rps = highest_rate(
            scenario.violations_at(),
            allowed=cell.allowed,
            low_rps=0.0,
            high_rps=cell.rate_rps,
            tolerance_rps=cell.rate_rps / 128,
        )
        return {"goodput_rps": rate_rps}
    if cell.kind == "replicas":
        least = least_replicas(
            lambda count: violation_share(replace(scenario, replicas=count).run().requests),
            allowed=cell.allowed,
            most=16,
        )
        return {"replicas": least}
    return summarize(scenario.run())


def _code_digest() -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for source in SOURCES:
        path = ROOT / source
        files = [path] if path.is_file() else sorted(path.rglob("*.py"), key=str)
        files += [] if path.is_file() else sorted(path.rglob("*.json"), key=str)
        for file in files:
            if file.name in NOT_SIMULATED:
                continue
            digest.update(str(file.relative_to(ROOT)).encode())
            digest.update(file.read_bytes())
    return digest.digest()
