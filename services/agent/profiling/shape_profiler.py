"""Times the iterations of a grid with the layers of a model's shape."""

import math
import statistics
from collections.abc import Callable, Sequence

import torch

from services.agent.profiling.grid import Sample
from services.agent.profiling.layers import LayerStack
from services.agent.profiling.model_shape import ModelShape
from services.agent.profiling.shape_grid import Batch, ShapeGrid
from services.agent.profiling.torch_device import TorchDevice
from shared.contracts.base import Seconds
from shared.contracts.errors import EngineError

_CACHES = 4
"""Times its cache that a device reads between two uses of the same weights."""
_LEAST_COPIES = 2
_TOLD = 8
"""Lines of progress in a repeat."""
_GIB = 1 << 30
_TERA = 1e12


class ShapeProfiler:
    """
    Times a model's layers on a device on which nothing else runs.

    Each iteration runs through all layers of the model, with the weights and the KV of so few
    of them that they fit, and of so many that none stays in the device's cache from one use to
    the next, unless the model is so small that it would.

    Args:
        shape: Of the model.
        device: That computes.
        overhead_s: Added to each iteration, for what an engine does besides.
        utilization: Share of the device's free memory that may be taken.
        seed: Of weights and tokens.
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
        """Layers with weights of their own."""
        enough = 1 + math.ceil(_CACHES * self._device.cache_bytes / self._shape.layer_bytes)
        return min(self._shape.num_layers, max(_LEAST_COPIES, enough))

    def measure(self, grid: ShapeGrid, tell: Callable[[str], None]) -> list[list[Sample]]:
        """
        Samples of each repeat, one of each batch.

        Args:
            grid: What does not fit the model or the device's memory is left out, and told.
            tell: Gets a line of progress now and then.

        Raises:
            SettingsError: A chunk or context does not fit the model.
            EngineError: The device has too little memory, or failed.
        """
        batches = self._fitting(grid.batches(self._shape, tell), tell)
        try:
            stack = LayerStack(
                self._shape,
                self._device.device,
                num_copies=self.num_copies,
                kv_tokens=max(_kv_tokens(each) for each in batches),
                seed=self._seed,
            )
            tell(f"{len(batches)} batches, {self.num_copies} of {self._shape.num_layers} layers "
                 "with weights of their own; warming up")  # fmt: skip
            for each in batches:
                self._times_s(stack, each, 1)
            repeats = grid.grid.repeats
            return [
                self._repeat(stack, batches, grid.passes, tell, f"repeat {number} of {repeats}")
                for number in range(1, repeats + 1)
            ]
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"{self._device.name} ran out of memory: fewer --batches, shorter --contexts, "
                f"--prefill-contexts or --chunks, or a lower --gpu-memory-utilization: {error}"
            ) from error
        except torch.AcceleratorError as error:
            raise EngineError(f"{self._device.name} failed: {error}") from error

    def _repeat(
        self,
        stack: LayerStack,
        batches: Sequence[Batch],
        passes: int,
        tell: Callable[[str], None],
        name: str,
    ) -> list[Sample]:
        samples = []
        most_flops = 0.0  # a second
        period = math.ceil(len(batches) / _TOLD)
        for number, each in enumerate(batches, start=1):
            time_s = statistics.median(self._times_s(stack, each, passes))
            samples.append(each.sample(self._overhead_s + time_s))
            most_flops = max(most_flops, each.flops(self._shape) / time_s)
            if number % period == 0 or number == len(batches):
                tell(
                    f"{name}, batch {number} of {len(batches)}; at most "
                    f"{most_flops / _TERA:.3g} TFLOP/s"
                )
        return samples

    def _times_s(self, stack: LayerStack, batch: Batch, passes: int) -> list[Seconds]:
        """Of *passes* iterations, after one that does not count."""
        ids, places = stack.inputs(batch)
        stack.run(batch, ids, places)
        return [self._device.time_s(lambda: stack.run(batch, ids, places)) for _ in range(passes)]

    def _fitting(self, batches: Sequence[Batch], tell: Callable[[str], None]) -> list[Batch]:
        """Those whose KV has room beside the weights."""
        shape = self._shape
        weights = shape.table_bytes + self.num_copies * shape.layer_bytes
        room_bytes = self._budget_bytes - weights
        room = room_bytes / (self.num_copies * shape.layer_kv_bytes_per_token)
        fitting = [each for each in batches if _kv_tokens(each) <= room]
        if not any(each.chunk_tokens for each in fitting):
            raise EngineError(
                f"{self._device.name} has too little memory: {self.num_copies} layers of "
                f"{shape.name} and its embeddings take {weights / _GIB:.2f} GiB, and KV besides; "
                f"{self._budget_bytes / _GIB:.2f} GiB may be taken"
            )
        if len(fitting) < len(batches):
            tell(f"left out, the device has no room: {len(batches) - len(fitting)} of "
                 f"{len(batches)} batches, with over {int(room)} tokens of KV")  # fmt: skip
        return fitting


def _kv_tokens(batch: Batch) -> int:
    return batch.decode_kv_tokens + batch.prefill_kv_tokens
