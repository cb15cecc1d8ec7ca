"""The worker's side of KV checkpoints: the host memory and the copies."""

import mmap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from services.agent.backends.totals import CheckpointTotals
from services.agent.backends.vllm.kv.transfers import Transfer, Transfers
from shared.contracts.base import Seconds

_AT_ONCE_BYTES = 1 << 20
"""Loads up to this size are copied without a thread, since starting a thread would take longer."""

LayerBlocks = npt.NDArray[np.uint8]
"""KV of one layer, uint8[num_blocks, bytes of a block]; writes change the engine's own memory."""


class HostStore:
    """
    Host memory for copies of KV blocks; a slot holds one block with all its layers.

    Saving is a synchronous memory copy in the engine's thread. It takes a few hundredths of the
    time that computing the blocks took, even with a tiny model.

    Loading runs layer by layer in a thread, concurrently with the forward pass, which waits at each
    layer for that layer's copies. If copying a layer is faster than computing it, other requests of
    the iteration are delayed only by the load of the first layer.

    Args:
        num_slots: Size of the memory in slots; the kernel allocates its pages on first use.
        layers: The engine's KV by layer name, in the order of computation.
        at_once_bytes: Loads up to this size are copied without a thread.
    """

    def __init__(
        self,
        num_slots: int,
        layers: Mapping[str, LayerBlocks],
        *,
        at_once_bytes: int = _AT_ONCE_BYTES,
    ) -> None:
        self._layers = tuple(layers.values())
        self._at_once_bytes = at_once_bytes
        sizes = [layer.shape[1] for layer in self._layers]
        ends = list(accumulate(sizes))
        self._parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._names = tuple(layers)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="restore-kv")
        self._loading: dict[str, Future[Seconds]] = {}
        """Layer name -> future of the duration of its copy; empty between iterations."""
        self.slot_bytes = ends[-1]
        self._memory = mmap.mmap(
            -1, num_slots * self.slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._slots = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_slots, -1)
        self._filled = np.zeros(num_slots, dtype=bool)
        self.step = 0
        """Last step whose transfers were executed."""
        self.failed: frozenset[int] = frozenset()
        """
        Blocks that were not loaded because their slots were never filled, which is a bug. These
        blocks must be computed again.
        """
        self.totals = CheckpointTotals()

    def carry_out(self, transfers: Transfers) -> None:
        """
        Execute the copies of *transfers* before the iteration writes any KV.

        No-op for a step whose transfers were executed before. An iteration that was preempted
        inside its forward pass is executed again without some requests, and blocks to save may be
        overwritten by then.
        """
        if transfers.step == self.step:
            return
        self.finish()
        self.step = transfers.step
        if transfers.cleared:
            self._clear()
        self._save(transfers.saves)
        filled = [load for load in transfers.loads if self._filled[load.slot]]
        self.failed = frozenset(load.block for load in transfers.loads) - {
            load.block for load in filled
        }
        self._load(filled)

    def wait_for(self, layer: str) -> None:
        """Wait for the copies of *layer*; returns immediately if none is in progress."""
        if layer in self._loading:
            self._loading[layer].result()

    def finish(self) -> None:
        """Wait for all copies, and add the time that they took to the totals."""
        copying_s = sum(each.result() for each in self._loading.values())
        self._loading.clear()
        self.totals = replace(self.totals, restore_s=self.totals.restore_s + copying_s)

    def _save(self, transfers: Sequence[Transfer]) -> None:
        """Copy blocks to host memory, in order."""
        if not transfers:
            return
        begun = time.perf_counter()
        count = 0
        for block, slot in transfers:
            for layer, part in zip(self._layers, self._parts, strict=True):
                self._slots[slot, part] = layer[block]
            self._filled[slot] = True
            count += 1
        self.totals = replace(
            self.totals,
            saved_blocks=self.totals.saved_blocks + count,
            saved_bytes=self.totals.saved_bytes + count * self.slot_bytes,
            save_s=self.totals.save_s + time.perf_counter() - begun,
        )

    def _load(self, transfers: Sequence[Transfer]) -> None:
        """Copy blocks from host memory; large loads are copied in a thread."""
        if not transfers:
            return
        num_bytes = len(transfers) * self.slot_bytes
        layers = zip(self._names, self._layers, self._parts, strict=True)
        copying_s = 0.0
        if num_bytes > self._at_once_bytes:
            for name, layer, part in layers:
                self._loading[name] = self._copier.submit(self._load_layer, layer, part, transfers)
        else:
            copying_s = sum(self._load_layer(layer, part, transfers) for _, layer, part in layers)
        self.totals = replace(
            self.totals,
            restored_blocks=self.totals.restored_blocks + len(transfers),
            restored_bytes=self.totals.restored_bytes + num_bytes,
            restore_s=self.totals.restore_s + copying_s,
        )

    def _load_layer(
        self, layer: LayerBlocks, part: slice, transfers: Sequence[Transfer]
    ) -> Seconds:
        begun = time.perf_counter()
        for block, slot in transfers:
            layer[block] = self._slots[slot, part]
        return time.perf_counter() - begun

    def _clear(self) -> None:
        """Return the memory to the kernel."""
        self._filled[:] = False
        self._memory.madvise(mmap.MADV_DONTNEED)
