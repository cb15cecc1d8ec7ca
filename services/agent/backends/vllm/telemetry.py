"""The shared memory of all engines, seen from the front."""

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from services.agent.backends.base import EngineRequest, SchedulingParameters
from services.agent.backends.totals import EngineTotals
from services.agent.backends.vllm.core_settings import refusal_path
from services.agent.backends.vllm.monitor import ArrivalMonitor
from services.agent.backends.vllm.safepoints import safepoints_path
from services.agent.backends.vllm.stats import EngineLoad, StatsReader
from shared.contracts.base import ModelName, Seconds
from shared.contracts.telemetry import EngineIteration

_NO_LOAD = EngineLoad(running=0, waiting=0, kv_utilization=0.0, kv_capacity_tokens=0)


class EngineTelemetry:
    """Each engine's reader and monitor, and the limits that apply to whichever is active."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._num_opened = 0
        self._readers: dict[ModelName, StatsReader] = {}
        self._monitors: dict[ModelName, ArrivalMonitor] = {}
        self._limits: SchedulingParameters | None = None
        self._ended = EngineTotals()
        """Of engines that are gone."""

    def directory(self) -> Path:
        """Where the files are; made when it is not there."""
        if self._directory is None or not self._directory.exists():
            self._directory = Path(tempfile.mkdtemp(prefix="headway-engine-"))
        return self._directory

    def open(self, model: ModelName) -> None:
        """Make the files for a new engine of *model*."""
        self._num_opened += 1
        path = self.directory() / f"{self._num_opened}.stats"
        self._readers[model] = StatsReader(path)
        self._monitors[model] = ArrivalMonitor(safepoints_path(path))

    def pass_on(self, donor: ModelName, model: ModelName) -> None:
        """The engine of *donor* is *model*'s now."""
        self._readers[model] = self._readers.pop(donor)
        self._monitors[model] = self._monitors.pop(donor)

    def path(self, model: ModelName) -> Path:
        """The file that *model*'s engine is to write; `open` comes first."""
        return self._readers[model].path

    def load(self, model: ModelName | None) -> EngineLoad:
        """
        What the engine of *model* last said; all zero if there is none.

        But totals are those of all engines that there have been: they never fall.
        """
        reader = None if model is None else self._readers.get(model)
        load = _NO_LOAD if reader is None else reader.load()
        totals = self._totals()
        return replace(load, scheduling=totals.scheduling, checkpoints=totals.checkpoints)

    def yields_s(self, model: ModelName | None, since: int) -> list[Seconds]:
        """Demand to safepoint, of the latest layer preemptions from number *since* on."""
        monitor = None if model is None else self._monitors.get(model)
        if monitor is None:
            return []
        elsewhere = self._totals().scheduling.layer_preemptions - monitor.totals().cuts
        return monitor.yields_s(max(0, since - elsewhere))

    def _totals(self) -> EngineTotals:
        return sum((self._totals_of(model) for model in self._readers), self._ended)

    def _totals_of(self, model: ModelName) -> EngineTotals:
        load, cuts = self._readers[model].load(), self._monitors[model].totals()
        scheduling = replace(
            load.scheduling,
            layer_preemptions=cuts.cuts,
            dropped_tokens=cuts.dropped_tokens,
            yield_s=cuts.yield_s,
        )
        return EngineTotals(scheduling=scheduling, checkpoints=load.checkpoints)

    def arrived(self, request: EngineRequest) -> None:
        """*request* has been sent to the engine of its model."""
        monitor = self._monitors.get(request.model)
        if monitor is not None:
            monitor.arrived(request)

    def answered(self, request: EngineRequest) -> None:
        """*request* has its first token, or will have none."""
        monitor = self._monitors.get(request.model)
        if monitor is not None:
            monitor.answered(request.request_id)

    def preempt(self, model: ModelName | None) -> bool:
        """Drop the best-effort part of what *model*'s engine computes; whether there is one."""
        monitor = None if model is None else self._monitors.get(model)
        return monitor is not None and monitor.preempt()

    def drain(self, model: ModelName | None) -> tuple[EngineIteration, ...]:
        """Iterations of *model*'s engine since the last call."""
        reader = None if model is None else self._readers.get(model)
        return () if reader is None else reader.drain()

    def limit(self, model: ModelName | None, limits: SchedulingParameters | None = None) -> None:
        """Apply *limits*, or those set before, to *model*'s engine."""
        self._limits = limits or self._limits
        reader = None if model is None else self._readers.get(model)
        if reader is not None and self._limits is not None:
            reader.limit(
                token_budget=self._limits.token_budget, max_running=self._limits.max_running
            )

    def max_running(self, most: int) -> int:
        """The limit on running requests, *most* if there is none."""
        return most if self._limits is None else min(most, self._limits.max_running)

    def forget(self, models: Iterable[ModelName]) -> None:
        """
        The engines of *models* are gone, and so are their files.

        One that is about to end goes on with what it has open; one that is still being made
        for nobody fails.
        """
        for model in models:
            if model in self._readers:
                self._ended += self._totals_of(model)
                reader = self._readers.pop(model)
                reader.close()
                self._monitors.pop(model).close()
                # They lie in memory where /tmp does. The host has read a refusal by now: it is
                # part of the event that ended the engine.
                for path in _files(reader.path):
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Forget all and remove the files."""
        self.forget(tuple(self._readers))
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _files(stats_path: Path) -> tuple[Path, ...]:
    """All that an engine may have left."""
    return stats_path, safepoints_path(stats_path), refusal_path(stats_path)
