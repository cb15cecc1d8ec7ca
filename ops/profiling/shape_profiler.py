"""Times the iterations of a grid with the layers of a model's shape."""

import math
import statistics
from collections.abc import Callable, Sequence

import torch

from ops.profiling.grid import Sample
from ops.profiling.layers import LayerStack
from ops.profiling.model_shape import ModelShape
from ops.profiling.shape_grid import Batch, ShapeGrid
from ops.profiling.torch_device import TorchDevice
from shared.contracts.base import Seconds
from shared.contracts.errors import EngineError

_CACHES = 4
"""
Bytes that a device reads between two uses of the same weights, as a multiple of its cache size.
"""
_LEAST_COPIES = 2
_PROGRESS_LINES = 8
"""Number of progress lines in a repeat."""
_GIB = 1 << 30
_TERA = 1e12


class ShapeProfiler:
    """
    Times a model's layers on an otherwise idle device.

    Each iteration runs through all layers of the model, but only some layers have separate weights
    and KV. These layers fit into memory, and are so many that none stays in the device's cache
    between two uses, unless the whole model is too small.

    Args:
        shape: Shape of the model.
        device: Device that computes.
        overhead_s: Time added to each iteration, for the engine's other work.
        utilization: Share of the device's free memory that may be used.
        seed: Seed of weights and tokens.
    """

    def __init__(
        self,
        shape: ModelShape,
        device: TorchDevice,
        *,
        overhead_s: Seconds,
        utilization: float,
        seed: int = 0,
    ) -> None:
        self._shape = shape
        self._device = device
        self._overhead_s = overhead_s
        self._budget_bytes = utilization * device.free_bytes
        self._seed = seed

    @property
    def num_copies(self) -> int:
        """Number of layers that have separate weights."""
        enough = 1 + math.ceil(_CACHES * self._device.cache_bytes / self._shape.layer_bytes)
        return min(self._shape.num_layers, max(_LEAST_COPIES, enough))

    def measure(self, grid: ShapeGrid, progress: Callable[[str], None]) -> list[list[Sample]]:
        """
        Time all batches of the grid; return the samples of each repeat, one sample for each batch.

        Args:
            grid: Grid to time; batches that do not fit the model or the device's memory are omitted
                and reported.
            progress: Receives progress lines.

        Raises:
            SettingsError: A chunk or context does not fit the model.
            EngineError: The device has too little memory, or failed.
        """
        batches = self._fitting(grid.batches(self._shape, progress), progress)
        try:
            stack = LayerStack(
                self._shape,
                self._device.device,
                num_copies=self.num_copies,
                kv_tokens=max(_kv_tokens(each) for each in batches),
                seed=self._seed,
            )
            progress(f"{len(batches)} batches, {self.num_copies} of {self._shape.num_layers} "
                 "layers with separate weights; warming up")  # fmt: skip
            for each in batches:
                self._times_s(stack, each, 1)
            repeats = grid.grid.repeats
            return [
                self._repeat(stack, batches, grid.passes, progress, f"repeat {number} of {repeats}")
                for number in range(1, repeats + 1)
            ]
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"{self._device.name} ran out of memory: use fewer --batches, shorter "
                "--contexts, --prefill-contexts or --chunks, or a lower "
                f"--gpu-memory-utilization: {error}"
            ) from error
        except torch.AcceleratorError as error:
            raise EngineError(f"{self._device.name} failed: {error}") from error

    def _repeat(
        self,
        stack: LayerStack,
        batches: Sequence[Batch],
        passes: int,
        progress: Callable[[str], None],
        name: str,
    ) -> list[Sample]:
        samples = []
        most_flops = 0.0  # operations per second
        period = math.ceil(len(batches) / _PROGRESS_LINES)
        for number, each in enumerate(batches, start=1):
            time_s = statistics.median(self._times_s(stack, each, passes))
            samples.append(each.sample(self._overhead_s + time_s))
            most_flops = max(most_flops, each.flops(self._shape) / time_s)
            if number % period == 0 or number == len(batches):
                progress(
                    f"{name}, batch {number} of {len(batches)}; at most "
                    f"{most_flops / _TERA:.3g} TFLOP/s"
                )
        return samples

    def _times_s(self, stack: LayerStack, batch: Batch, passes: int) -> list[Seconds]:
        """Times of *passes* iterations, after one warm-up iteration."""
        ids, places = stack.inputs(batch)
        stack.run(batch, ids, places)
        return [self._device.time_s(lambda: stack.run(batch, ids, places)) for _ in range(passes)]

    def _fitting(self, batches: Sequence[Batch], progress: Callable[[str], None]) -> list[Batch]:
        """Batches whose KV fits into memory together with the weights."""
        shape = self._shape
        weights = shape.table_bytes + self.num_copies * shape.layer_bytes
        room_bytes = self._budget_bytes - weights
        room = room_bytes / (self.num_copies * shape.layer_kv_bytes_per_token)
        fitting = [each for each in batches if _kv_tokens(each) <= room]
        if not any(each.chunk_tokens for each in fitting):
            raise EngineError(
                f"{self._device.name} has too little memory: {self.num_copies} layers of "
                f"{shape.name} and its embeddings take {weights / _GIB:.2f} GiB without KV; "
                f"the limit is {self._budget_bytes / _GIB:.2f} GiB"
            )
        if len(fitting) < len(batches):
            progress(f"left out for lack of room on the device: {len(batches) - len(fitting)} of "
                 f"{len(batches)} batches, with over {int(room)} tokens of KV")  # fmt: skip
        return fitting


def _kv_tokens(batch: Batch) -> int:
    return batch.decode_kv_tokens + batch.prefill_kv_tokens
