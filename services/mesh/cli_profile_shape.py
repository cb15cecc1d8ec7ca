"""`headway profile --shape CONFIG`: times a model's layers with plain torch, without an engine."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from services.agent.profiling.model_shape import ModelShape
from services.agent.profiling.shape_config import read_shape
from services.agent.profiling.shape_grid import ShapeGrid
from services.mesh.cli_profile_output import (
    Report,
    Subject,
    add_grid_options,
    add_numbers,
    add_output_options,
    check_output,
    grid_of,
    report_of,
    tell,
    write,
)
from shared.contracts.base import ModelName
from shared.contracts.errors import SettingsError
from shared.runtime.arguments import HelpFormatter
from shared.runtime.clock import SystemClock
from shared.runtime.lifecycle import EXIT_OK

ENGINE = "torch"
"""What the profile says it was measured on."""
_OPTION = "--shape"
_HELP = {"-h", "--help"}
_DEFAULT = ShapeGrid()
_GIB = 1 << 30


def asks_for_shape(arguments: Sequence[str]) -> bool:
    """Whether these options are of this form."""
    return any(each == _OPTION or each.startswith(f"{_OPTION}=") for each in arguments)


def profile_shape(arguments: Sequence[str]) -> int:
    """
    Time, fit, write; gives the exit code.

    Raises:
        SettingsError: A value makes no sense, there is no such device or no torch, or a file
            cannot be read or written.
        EngineError: The device has too little memory, or failed.
    """
    # Else `--shape --help` would miss its CONFIG.
    options = _parser().parse_args(["--help"] if _HELP & {*arguments} else arguments)
    if not 0 <= options.overhead_s < math.inf:
        raise SettingsError(f"--overhead-s: {options.overhead_s:g} is no time")
    if not 0 < options.gpu_memory_utilization <= 1:
        raise SettingsError(
            f"--gpu-memory-utilization: {options.gpu_memory_utilization:g} is not above 0, "
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
        # Here, not above: torch takes seconds to load, and other verbs do without it.
        from services.agent.profiling.shape_profiler import ShapeProfiler  # noqa: PLC0415
        from services.agent.profiling.torch_device import find_device  # noqa: PLC0415
    except ImportError as error:
        raise SettingsError(f"--shape needs torch: pip install torch ({error})") from error
    device = find_device(options.device)
    utilization = options.gpu_memory_utilization
    capacity = shape.kv_capacity_tokens(free_bytes=device.free_bytes, utilization=utilization)
    tell(f"timing {shape.name} in {shape.dtype} on {device.name}, {device.free_bytes / _GIB:.1f} "
         "GiB free")  # fmt: skip
    if not capacity:
        tell(f"the whole of {shape.name} has no room there: {shape.weight_bytes / _GIB:.1f} GiB of "
             "weights; the profile does not say how much KV has")  # fmt: skip
    profiler = ShapeProfiler(
        shape,
        device,
        overhead_s=options.overhead_s,
        utilization=utilization,
        seed=options.seed,
    )
    repeats = profiler.measure(grid, tell)
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
        epilog="What it does not time: scheduling, sampling, tokenizers, rotary embeddings, and "
        "whatever an engine does otherwise than plain torch.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        _OPTION, type=Path, required=True, metavar="CONFIG",
        help="config.json of Hugging Face, or a folder with one; dense layers as in Llama",
    )  # fmt: skip
    parser.add_argument("--model", help="name in the profile; default: that of the folder or file")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
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
        help="iterations of each kind in each repeat, whose median counts",
    )  # fmt: skip
    parser.add_argument(
        "--overhead-s", type=float, default=0.0, metavar="SECONDS",
        help="added to every iteration, for what an engine does besides: scheduling, sampling, "
        "answering; torch cannot know it. What `headway profile --engine vllm` says of the same "
        "model and device, less this profile, is what it was there",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE",
        help="of the device's free memory that weights and KV may take, as vLLM's, 0..1",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the weights and tokens"
    )
    add_output_options(parser)
    return parser
