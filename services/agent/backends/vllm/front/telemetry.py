"""The front's side of the shared memory of all engines."""

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from services.agent.backends.base import EngineLoad, SchedulingParameters
from services.agent.backends.totals import EngineTotals
from services.agent.backends.vllm.front.monitor import ArrivalMonitor
from services.agent.backends.vllm.front.rank_stats import RankStats
from services.agent.backends.vllm.shared.core_settings import refusal_path
from services.agent.backends.vllm.shared.safepoints import safepoints_path
from shared.contracts.base import ModelName
from shared.contracts.telemetry import EngineIteration


class EngineTelemetry:
    """Telemetry reader and arrival monitor of each engine, and the limits of the active engine."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._num_opened = 0
        self._engines: dict[ModelName | None, tuple[RankStats, ArrivalMonitor]] = {}
        self._limits: SchedulingParameters | None = None
        self._ended = EngineTotals()
        """Totals of engines that have ended."""

    def directory(self) -> Path:
        """Directory of the shared files; created on first use."""
        if self._directory is None or not self._directory.exists():
            self._directory = Path(tempfile.mkdtemp(prefix="headway-engine-"))
        return self._directory

    def open(self, model: ModelName, num_ranks: int = 1) -> None:
        """Create the shared files for a new engine of *model* with *num_ranks* cores."""
        self._num_opened += 1
        path = self.directory() / f"{self._num_opened}.stats"
        self._engines[model] = RankStats(path, num_ranks), ArrivalMonitor(safepoints_path(path))

    def pass_on(self, donor: ModelName, model: ModelName) -> None:
        """Assign the engine of *donor* to *model*."""
        self._engines[model] = self._engines.pop(donor)

    def path(self, model: ModelName) -> Path:
        """File that *model*'s engine writes telemetry to; `open` must be called first."""
        return self._engines[model][0].path

    def load(self, model: ModelName | None) -> EngineLoad:
        """
        Load of *model*'s engine as last published; all zero if the model has no engine.

        Totals include those of ended engines, so that they never decrease.
        """
        load = self._engines[model][0].load() if model in self._engines else EngineLoad()
        totals = sum(map(_totals_of, self._engines.values()), self._ended)
        return replace(load, scheduling=totals.scheduling, checkpoints=totals.checkpoints)

    def monitor(self, model: ModelName | None) -> ArrivalMonitor | None:
        """Monitor of arrivals at *model*'s engine; None if the model has no engine."""
        return self._engines[model][1] if model in self._engines else None

    def drain(self, model: ModelName | None) -> tuple[EngineIteration, ...]:
        """Iterations of *model*'s engine since the last call."""
        return self._engines[model][0].drain() if model in self._engines else ()

    def limit(self, model: ModelName | None, limits: SchedulingParameters | None = None) -> None:
        """Apply *limits* to *model*'s engine; without *limits*, apply the previous limits again."""
        self._limits = limits or self._limits
        if model in self._engines and self._limits is not None:
            self._engines[model][0].limit(
                token_budget=self._limits.token_budget, max_running=self._limits.max_running
            )

    def max_running(self, most: int) -> int:
        """The limit of running requests, at most *most*."""
        return most if self._limits is None else min(most, self._limits.max_running)

    def forget(self, models: Iterable[ModelName | None]) -> None:
        """
        Remove the shared files of engines that have ended.

        An engine that is about to end still has its files open. If an activation is abandoned while
        its engine is being created, the creation fails without the files.
        """
        for model in models:
            if model in self._engines:
                engine = self._engines.pop(model)
                self._ended += _totals_of(engine)
                # The files occupy memory where /tmp is in memory. The file with a refusal is no
                # longer needed: the event that ended the engine contains its reason.
                for path in _files(engine[0]):
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all engines and their files."""
        self.forget(tuple(self._engines))
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _files(stats: RankStats) -> tuple[Path, ...]:
    """All files that an engine may have created."""
    return *stats.paths, safepoints_path(stats.path), refusal_path(stats.path)


def _totals_of(engine: tuple[RankStats, ArrivalMonitor]) -> EngineTotals:
    reader, monitor = engine
    load = reader.load()
    return EngineTotals(scheduling=load.scheduling + monitor.totals(), checkpoints=load.checkpoints)
