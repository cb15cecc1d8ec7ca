"""The shared memory of all engines, seen from the front."""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from services.agent.backends.base import SchedulingParameters
from services.agent.backends.vllm.stats import EngineLoad, StatsReader
from shared.contracts.base import ModelName
from shared.contracts.telemetry import Iteration


class EngineTelemetry:
    """One `StatsReader` per engine, and the limits that apply to whichever is active."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._num_opened = 0
        self._readers: dict[ModelName, StatsReader] = {}
        self._limits: SchedulingParameters | None = None

    def directory(self) -> Path:
        """Where the files are; made when it is not there."""
        if self._directory is None or not self._directory.exists():
            self._directory = Path(tempfile.mkdtemp(prefix="headway-engine-"))
        return self._directory

    def open(self, model: ModelName) -> None:
        """Make the file for a new engine of *model*."""
        self._num_opened += 1
        self._readers[model] = StatsReader(self.directory() / f"{self._num_opened}.stats")

    def path(self, model: ModelName) -> Path:
        """The file that *model*'s engine is to write; `open` comes first."""
        return self._readers[model].path

    def load(self, model: ModelName | None) -> EngineLoad:
        """What the engine of *model* last said; all zero if there is none."""
        reader = None if model is None else self._readers.get(model)
        if reader is None:
            return EngineLoad(running=0, waiting=0, kv_utilization=0.0, kv_capacity_tokens=0)
        return reader.load()

    def drain(self, model: ModelName | None) -> tuple[Iteration, ...]:
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
        """The engines of *models* are gone."""
        for model in models:
            reader = self._readers.pop(model, None)
            if reader is not None:
                reader.close()

    def close(self) -> None:
        """Forget all and remove the files."""
        self.forget(tuple(self._readers))
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
