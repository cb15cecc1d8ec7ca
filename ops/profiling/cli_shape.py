"""`headway profile shape`: times a model's layers with plain torch, without an engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from ops.profiling.model_shape import ModelShape
from ops.profiling.output import OutputOptions, Report, Subject, progress, report_of
from ops.profiling.shape_config import read_shape
from ops.profiling.shape_grid import ShapeGrid
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_OK
from shared.runtime.options import File, IntegerOption, Name, SecondsOption

ENGINE = "torch"
"""Engine name in profiles of model shapes."""
_GIB = 1 << 30


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeOptions:
    """The profile's name, the device, and what is timed on it."""

    model: Name | None = None
    """Name in the profile; default: name of the folder or file."""
    device: Annotated[str, Parameter(metavar="DEVICE")] = "cuda"
    """Device: cuda, cuda:N or cpu."""
    overhead_s: SecondsOption = 0.0
    """
    Seconds added to every iteration for the engine's other work: scheduling, sampling, answering,
    which torch cannot measure. To determine it, subtract this profile from that of `headway profile
    --engine vllm` with the same model and device.
    """
    gpu_memory_utilization: Annotated[
        float, Parameter(validator=Number(gt=0, lte=1), metavar="SHARE")
    ] = 0.9
    """Share of the device's free memory for weights and KV, 0..1, as in vLLM."""
    seed: IntegerOption = 0
    """Seed of the weights and tokens."""


_OPTIONS, _GRID, _OUTPUT = ShapeOptions(), ShapeGrid(), OutputOptions()


def profile_shape(
    config: Annotated[
        File,
        Parameter(
            help="config.json of Hugging Face, or a folder with one; dense layers as in Llama."
        ),
    ],
    /,
    *,
    options: ShapeOptions = _OPTIONS,
    grid: ShapeGrid = _GRID,
    output: OutputOptions = _OUTPUT,
) -> int:
    """
    Time the layers of a model's config.json with plain torch, without an engine.

    The layers have random weights. Not timed: scheduling, sampling, tokenizers, rotary embeddings,
    and everything that an engine does differently from plain torch.

    Raises:
        SettingsError: A value is invalid, the device or torch is missing, or a file cannot be read
            or written.
        EngineError: The device has too little memory, or failed.
    """
    shape = read_shape(config)
    output.check()
    output.write(_timed(shape, grid, options, output.out))
    return EXIT_OK


def _timed(shape: ModelShape, grid: ShapeGrid, options: ShapeOptions, file: Path) -> Report:
    try:
        # Local import: torch takes seconds to load, and other verbs do not need it.
        from ops.profiling.shape_profiler import ShapeProfiler  # noqa: PLC0415
        from ops.profiling.torch_device import find_device  # noqa: PLC0415
    except ImportError as error:
        raise SettingsError(f"timing a shape needs torch: pip install torch ({error})") from error
    device = find_device(options.device)
    utilization = options.gpu_memory_utilization
    capacity = shape.kv_capacity_tokens(free_bytes=device.free_bytes, utilization=utilization)
    progress(f"timing {shape.name} in {shape.dtype} on {device.name}, "
         f"{device.free_bytes / _GIB:.1f} GiB free")  # fmt: skip
    if not capacity:
        progress(
            f"{shape.name} does not fit on the device: {shape.weight_bytes / _GIB:.1f} GiB "
            "of weights; the profile has no KV capacity"
        )
    profiler = ShapeProfiler(
        shape,
        device,
        overhead_s=options.overhead_s,
        utilization=utilization,
        seed=options.seed,
    )
    repeats = profiler.measure(grid, progress)
    subject = Subject(
        model=ModelName(options.model or shape.name),
        engine=ENGINE,
        device=device.name,
        kv_capacity_tokens=capacity or None,
    )
    return report_of(repeats, subject, file=file, now=SystemClock().now())
