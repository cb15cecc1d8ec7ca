"""`headway profile`: measures a live engine, and writes a profile that the simulator reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ops.profiling.grid import Grid
from ops.profiling.output import OutputOptions, Report, Subject, progress, report_of
from ops.profiling.profiler import Profiler
from services.agent.backends.registry import BACKENDS, create_backend
from services.agent.backends.settings import EngineSettings, SimulatedSettings, VllmSettings
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_OK
from shared.runtime.options import File, Folder, Name, whole
from shared.runtime.program import verb

_NOTES = """\
A grid of prompt chunks, contexts and batches of decodes is measured, and the
latency model is fitted (ConServe, section 4.2). Nothing else should run on the
device: stop its agents first. `headway simulate --profile` reads the profile."""
_TIME_SCALE = 0.05
"""Time scale of the simulated engine; the engine reports times as at scale 1."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The measured engine and its model."""

    engine: Annotated[str, Parameter(choices=sorted(BACKENDS))] = "simulated"
    """Engine to measure."""
    registry: File | None = None
    """Registry of the model; default: tiny models, created in --models-dir."""
    model: Name | None = None
    """Base model; default: the first of the registry."""
    seed: Annotated[int, whole(least=0)] = 0
    """Seed of the prompts' tokens."""
    models_dir: Folder = Path(".headway/profile/models")
    """Directory of the tiny models created without a registry."""
    engine_log: File | None = None
    """File for vLLM's output; default: standard error."""


_ENGINE, _GRID, _OUTPUT = EngineOptions(), Grid(), OutputOptions()


async def profile(
    *, options: EngineOptions = _ENGINE, grid: Grid = _GRID, output: OutputOptions = _OUTPUT
) -> int:
    """
    Measure an engine, and write a profile for the simulator.

    Raises:
        SettingsError: A value is invalid, or a file cannot be read or written.
        EngineError: The engine did not start, died, or took too long.
    """
    output.check()
    output.write(await _measured(options, grid, output.out))
    return EXIT_OK


PROFILE = verb("profile", profile, examples=_NOTES)


async def _measured(options: EngineOptions, grid: Grid, file: Path) -> Report:
    entry = _entry(options)
    clock = SystemClock()
    engine = create_backend(options.engine, [entry], _settings(options, grid), clock)
    progress(f"starting {options.engine} with {entry.name}")
    await engine.start()
    try:
        await engine.activate(entry.name)
        profiler = Profiler(
            engine, entry.name, max_model_len=entry.max_model_len, seed=options.seed
        )
        repeats = await profiler.measure(grid, progress)
        identity = engine.identity
    finally:
        await engine.close()
    subject = Subject(model=entry.name, engine=identity.engine, device=identity.device)
    return report_of(repeats, subject, file=file, now=clock.now())


def _entry(options: EngineOptions) -> ModelEntry:
    """The model to profile, from the registry or a tiny model that is created here."""
    file = options.registry
    if file is None:
        file = make_tiny_models(options.models_dir, weights=options.engine == "vllm")
    registry = ModelRegistry.load(file)
    name = options.model or registry.bases[0]
    if name not in registry.bases:
        raise SettingsError(f"--model: {name!r} must be one of {', '.join(registry.bases)}")
    return registry.entry(ModelName(name))


def _settings(options: EngineOptions, grid: Grid) -> EngineSettings:
    """
    Engine limits for the largest batch of the grid; prompts are served in order in full chunks.
    """
    token_budget, max_running = max(grid.chunks) + max(grid.batches), max(grid.batches) + 1
    return EngineSettings(
        backend=options.engine,
        simulated=SimulatedSettings(
            policy="fcfs",
            token_budget=token_budget,
            max_running=max_running,
            time_scale=_TIME_SCALE,
        ),
        vllm=VllmSettings(
            policy="fcfs",
            token_budget=token_budget,
            max_running=max_running,
            prefix_caching=False,
            log_path=None if options.engine_log is None else str(options.engine_log),
        ),
    )
