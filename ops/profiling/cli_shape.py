"""`headway profile --shape CONFIG`: times a model's layers with plain torch, without an engine."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from ops.profiling.model_shape import ModelShape
from ops.profiling.output import (
    Report,
    Subject,
    add_grid_options,
    add_numbers,
    add_output_options,
    check_output,
    grid_of,
    progress,
    report_of,
    write,
)
from ops.profiling.shape_config import read_shape
from ops.profiling.shape_grid import ShapeGrid
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.runtime.arguments import HelpFormatter
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_OK

ENGINE = "torch"
"""Engine name in profiles of model shapes."""
_OPTION = "--shape"
_HELP = {"-h", "--help"}
_DEFAULT = ShapeGrid()
_GIB = 1 << 30


def asks_for_shape(arguments: Sequence[str]) -> bool:
    """Return whether the arguments select profiling by model shape."""
    return any(each == _OPTION or each.startswith(f"{_OPTION}=") for each in arguments)


def profile_shape(arguments: Sequence[str]) -> int:
    """
    Time the layers of a model shape, fit a latency model and write a profile; return the exit code.

    Raises:
        SettingsError: A value is invalid, the device or torch is missing, or a file cannot be read
            or written.
        EngineError: The device has too little memory, or failed.
    """
    # Parse `--help` alone: with `--shape --help`, argparse would require CONFIG.
    options = _parser().parse_args(["--help"] if _HELP & {*arguments} else arguments)
    if not 0 <= options.overhead_s < math.inf:
        raise SettingsError(
            f"--overhead-s: {options.overhead_s:g} must be a non-negative number of seconds"
        )
    if not 0 < options.gpu_memory_utilization <= 1:
        raise SettingsError(
            f"--gpu-memory-utilization: {options.gpu_memory_utilization:g} must be above 0, "
            "and at most 1"
        )
    grid = ShapeGrid(
        grid=grid_of(options), prefill_contexts=options.prefill_contexts, passes=options.passes
    )
    shape = read_shape(options.shape)
    check_output(options)
    write(_timed(shape, grid, options), options)
    return EXIT_OK


def _timed(shape: ModelShape, grid: ShapeGrid, options: argparse.Namespace) -> Report:
    try:
        # Local import: torch takes seconds to load, and other verbs do not need it.
        from ops.profiling.shape_profiler import ShapeProfiler  # noqa: PLC0415
        from ops.profiling.torch_device import find_device  # noqa: PLC0415
    except ImportError as error:
        raise SettingsError(f"--shape needs torch: pip install torch ({error})") from error
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
    return report_of(repeats, subject, file=options.out, now=SystemClock().now())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway profile --shape",
        description="Time the layers of a model's shape, with random weights, on a grid of prompt "
        "chunks, their contexts, and batches of decodes; fit the latency model (ConServe §4.2), "
        "and write a profile that `headway simulate --profile` reads. Nothing else should run on "
        "the device.",
        epilog="Not timed: scheduling, sampling, tokenizers, rotary embeddings, and "
        "everything that an engine does differently from plain torch.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        _OPTION, type=Path, required=True, metavar="CONFIG",
        help="config.json of Hugging Face, or a folder with one; dense layers as in Llama",
    )  # fmt: skip
    parser.add_argument("--model", help="name in the profile; default: name of the folder or file")
    parser.add_argument("--device", default="cuda", help="device: cuda, cuda:N or cpu")
    add_grid_options(parser)
    add_numbers(
        parser,
        "prefill-contexts",
        default=_DEFAULT.prefill_contexts,
        about="tokens of a prompt that were computed before a chunk of it",
        least=0,
    )
    parser.add_argument(
        "--passes", type=int, default=_DEFAULT.passes, metavar="N",
        help="iterations of each kind in each repeat; their median is used",
    )  # fmt: skip
    parser.add_argument(
        "--overhead-s", type=float, default=0.0, metavar="SECONDS",
        help="seconds added to every iteration for the engine's other work: scheduling, "
             "sampling, answering, which torch cannot measure. To determine it, subtract this "
             "profile from that of `headway profile --engine vllm` with the same model and "
             "device",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE",
        help="share of the device's free memory for weights and KV, 0..1, as in vLLM",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the weights and tokens"
    )
    add_output_options(parser)
    return parser
