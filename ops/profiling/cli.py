"""`headway profile`: measures a live engine, and writes a profile that the simulator reads."""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from ops.profiling.cli_shape import asks_for_shape, profile_shape
from ops.profiling.grid import Grid
from ops.profiling.output import (
    Report,
    Subject,
    add_grid_options,
    add_output_options,
    check_output,
    grid_of,
    progress,
    report_of,
    write,
)
from ops.profiling.profiler import Profiler
from services.agent.backends.registry import BACKENDS, create_backend
from services.agent.backends.settings import EngineSettings, SimulatedSettings, VllmSettings
from shared.contracts.errors import SettingsError
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.runtime.arguments import HelpFormatter
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_OK

_TIME_SCALE = 0.05
"""Time scale of the simulated engine; the engine reports times as at scale 1."""


def profile(arguments: Sequence[str]) -> int:
    """
    Measure an engine, fit its latency model and write a profile; return the exit code.

    Raises:
        SettingsError: A value is invalid, or a file cannot be read or written.
        EngineError: The engine did not start, died, or took too long; or timing a shape failed.
    """
    if asks_for_shape(arguments):
        return profile_shape(arguments)
    options = _parser().parse_args(arguments)
    grid = grid_of(options)
    check_output(options)
    write(asyncio.run(_measured(options, grid)), options)
    return EXIT_OK


async def _measured(options: argparse.Namespace, grid: Grid) -> Report:
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
    return report_of(repeats, subject, file=options.out, now=clock.now())


def _entry(options: argparse.Namespace) -> ModelEntry:
    """The model to profile, from the registry or a tiny model that is created here."""
    file = options.registry
    if file is None:
        file = make_tiny_models(options.models_dir, weights=options.engine == "vllm")
    registry = ModelRegistry.load(file)
    name = options.model or registry.bases[0]
    if name not in registry.bases:
        raise SettingsError(f"--model: {name!r} must be one of {', '.join(registry.bases)}")
    return registry.entry(name)


def _settings(options: argparse.Namespace, grid: Grid) -> EngineSettings:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway profile",
        description="Measure a grid of prompt chunks, contexts and batches of decodes on a live "
        "engine, fit its latency model (ConServe §4.2), and write a profile that "
        "`headway simulate --profile` reads. Stop agents on the same device first.",
        epilog="Without an engine: `headway profile --shape CONFIG` times the layers of a model's "
        "config.json with plain torch; `headway profile --shape --help` lists the options.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--engine", default="simulated", choices=sorted(BACKENDS), help="engine to measure"
    )
    parser.add_argument(
        "--registry",
        type=Path,
        metavar="FILE",
        help="registry of the model; default: tiny models, created in --models-dir",
    )
    parser.add_argument("--model", help="base model; default: the first of the registry")
    add_grid_options(parser)
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the prompts' tokens"
    )
    add_output_options(parser)
    parser.add_argument(
        "--models-dir", type=Path, default=Path(".headway/profile/models"), metavar="DIR",
        help="directory of the tiny models created without a registry",
    )  # fmt: skip
    parser.add_argument(
        "--engine-log",
        type=Path,
        metavar="FILE",
        help=("file for vLLM's output; default: standard error"),
    )
    return parser
