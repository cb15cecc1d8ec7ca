"""Number of devices of engines, from the models' `engine_args`."""

import math
from collections.abc import Iterable

from shared.contracts.models import ModelEntry

_RANKS = "data_parallel_size"
_WITHIN_RANK = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
)


def num_ranks(entry: ModelEntry) -> int:
    """Number of engine cores of the model's engine: its data-parallel ranks."""
    return int(entry.engine_args.get(_RANKS, 1))


def num_devices(entry: ModelEntry) -> int:
    """
    Number of devices, or of workers on a CPU, over which vLLM spreads the model.

    Expert parallelism distributes experts over the same devices, and adds none.
    """
    within = (int(entry.engine_args.get(name, 1)) for name in _WITHIN_RANK)
    return num_ranks(entry) * math.prod(within)


def device_name(device: str, entries: Iterable[ModelEntry]) -> str:
    """
    Name of the devices of an instance: `NVIDIA H200`, or `2 x NVIDIA H200` if its engines use two.

    The name is part of the key of profiles. If the models have engines of several sizes, it
    contains each size (`1/4 x NVIDIA H200`), so that a profile never mixes instances of different
    sizes.
    """
    sizes = sorted({num_devices(entry) for entry in entries}) or [1]
    return device if sizes == [1] else f"{'/'.join(map(str, sizes))} x {device}"
