"""`headway profile`: measures a live engine, and writes a profile that the simulator reads."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.agent.backends.registry import BACKENDS, create_backend
from services.agent.backends.settings import EngineSettings, SimulatedSettings, VllmSettings
from services.agent.profiling.fit import Cell, cells_of, errors_of, fitted
from services.agent.profiling.grid import Grid, Sample
from services.agent.profiling.profiler import Profiler
from services.mesh import profile_picture
from shared.contracts.base import encode
from shared.contracts.errors import EngineError, SettingsError
from shared.contracts.estimates import Profile
from shared.contracts.models import ModelEntry
from shared.models.registry import ModelRegistry
from shared.models.tiny import make_tiny_models
from shared.runtime.cli import print_data
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_OK

_DEFAULT = Grid()
_TIME_SCALE = 0.05
"""Of the simulated engine: what it reports is as it would be at 1."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    file: str
    profile: Profile
    cells: list[Cell]


def profile(arguments: Sequence[str]) -> int:
    """
    Measure, fit, write; gives the exit code.

    Raises:
        SettingsError: A value makes no sense, or a file cannot be read or written.
        EngineError: The engine did not start, died, or took too long.
    """
    options = _parser().parse_args(arguments)
    grid = Grid(
        chunks=options.chunks,
        contexts=options.contexts,
        batches=options.batches,
        repeats=options.repeats,
    )
    if not options.out.parent.is_dir():
        raise SettingsError(f"--out: {options.out.parent} is no directory")
    if options.plot is not None:
        profile_picture.check(options.plot)
    report = asyncio.run(_measured(options, grid))
    try:
        options.out.write_bytes(encode(report.profile) + b"\n")
    except OSError as error:
        raise SettingsError(f"--out: cannot write {options.out}: {error}") from error
    if options.plot is not None:
        found = report.profile
        title = f"{found.model} on {found.engine}, {found.device}"
        profile_picture.draw(report.cells, options.plot, title=title)
    if options.json:
        print_data(report, as_json=True)
    else:
        _show(report)
    return EXIT_OK


async def _measured(options: argparse.Namespace, grid: Grid) -> Report:
    entry = _entry(options)
    clock = SystemClock()
    engine = create_backend(options.engine, [entry], _settings(options, grid), clock)
    _tell(f"starting {options.engine} with {entry.name}")
    await engine.start()
    try:
        await engine.activate(entry.name)
        profiler = Profiler(
            engine, entry.name, max_model_len=entry.max_model_len, seed=options.seed
        )
        repeats = await profiler.measure(grid, _tell)
        identity = engine.identity
    finally:
        await engine.close()
    samples = [each for repeat in repeats for each in repeat]
    if not samples:
        raise EngineError("the engine reported no iterations")
    latency, errors = fitted(samples), errors_of(repeats)
    now = clock.now()
    found = Profile(
        model=entry.name,
        engine=identity.engine,
        device=identity.device,
        version=int(now * 1000),
        at=now,
        latency=latency,
        latency_error=errors.median if errors else None,
        latency_error_p95=errors.p95 if errors else None,
        latency_bias=errors.bias if errors else None,
        num_iterations=len(samples),
        token_rate_per_s=_rate(samples),
    )
    return Report(file=str(options.out), profile=found, cells=cells_of(samples, latency))


def _rate(samples: Sequence[Sample]) -> float:
    """Tokens a second over all that was measured."""
    return sum(each.work.tokens for each in samples) / sum(each.duration_s for each in samples)


def _entry(options: argparse.Namespace) -> ModelEntry:
    """The model, of the registry or a tiny one that is made here."""
    file = options.registry
    if file is None:
        file = make_tiny_models(options.models_dir, weights=options.engine == "vllm")
    registry = ModelRegistry.load(file)
    name = options.model or registry.bases[0]
    if name not in registry.bases:
        raise SettingsError(f"--model: {name!r} is none of {', '.join(registry.bases)}")
    return registry.entry(name)


def _settings(options: argparse.Namespace, grid: Grid) -> EngineSettings:
    """Limits that hold the grid; prompts in order, in pieces as large as the limits allow."""
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


def _show(report: Report) -> None:
    found, latency = report.profile, report.profile.latency
    print(f"{found.model} on {found.engine}, {found.device}: {found.num_iterations} iterations")
    if latency is not None:
        for name in latency.__struct_fields__:
            print(f"  {name:<12} {getattr(latency, name):.3g}")
    if found.latency_error is not None and found.latency_error_p95 is not None:
        print(
            f"error on the last repeat, told from the others: median {found.latency_error:.1%}, "
            f"p95 {found.latency_error_p95:.1%}"
        )
    print(f"{report.file}: for headway simulate --profile")


def _tell(text: str) -> None:
    print(f"profile: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway profile",
        description="Measure a grid of prompt chunks, contexts and batches of decodes on a live "
        "engine, fit its latency model (ConServe §4.2), and write a profile that "
        "`headway simulate --profile` reads. Stop agents on the same device first.",
    )
    parser.add_argument("--engine", default="simulated", choices=sorted(BACKENDS))
    parser.add_argument("--registry", type=Path, metavar="FILE", help="default: tiny models")
    parser.add_argument("--model", help="default: the first of the registry")
    for name, unit in (
        ("chunks", "tokens of a prompt in one iteration"),
        ("contexts", "tokens of each decode's prompt"),
        ("batches", "decodes beside it; alone is always measured, too"),
    ):
        values = getattr(_DEFAULT, name)
        parser.add_argument(
            f"--{name}",
            type=_numbers,
            default=values,
            metavar="N,N,…",
            help=f"{unit}; default {','.join(map(str, values))}",
        )
    parser.add_argument("--repeats", type=int, default=_DEFAULT.repeats, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' tokens")
    parser.add_argument("--out", type=Path, default=Path("profile.json"), metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture, e.g. profile.png")
    parser.add_argument("--json", action="store_true", help="profile and all cells as one line")
    parser.add_argument(
        "--models-dir", type=Path, default=Path(".headway/profile/models"), metavar="DIR",
        help="where tiny models are made when there is no registry",
    )  # fmt: skip
    parser.add_argument("--engine-log", type=Path, metavar="FILE", help="vLLM's output")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,N,… of whole numbers") from None
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: each has to be at least 1")
    return numbers
