"""A device that plain torch computes on: its memory, its caches, and how time is taken there."""

import os
import time
from collections.abc import Callable
from typing import Protocol

import torch

from shared.contracts.base import Seconds
from shared.contracts.errors import SettingsError

_CPU_CACHE_BYTES = 64 << 20
"""What the last-level cache of a CPU is taken to be; torch does not say."""


class TorchDevice(Protocol):
    """Where a shape is timed."""

    device: torch.device
    name: str
    """As vLLM calls it in a profile."""
    cache_bytes: int
    """What weights may stay in from one use to the next."""
    free_bytes: int
    """Before anything was allocated here."""

    def time_s(self, run: Callable[[], object]) -> Seconds:
        """How long the device takes for *run*, with nothing before it."""


class CudaDevice:
    """
    A GPU, timed by its own events.

    Args:
        device: One that is there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(torch.cuda.get_device_name(device))
        self.cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self.free_bytes = int(torch.cuda.mem_get_info(device)[0])

    def time_s(self, run: Callable[[], object]) -> Seconds:
        """From the first kernel to the last, waits for launches included."""
        with torch.cuda.device(self.device):
            begun = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begun.record()
            run()
            ended.record()
            torch.cuda.synchronize()
            return float(begun.elapsed_time(ended)) / 1000


class CpuDevice:
    """The machine's own processor; for a try."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "cpu"
        self.cache_bytes = _CPU_CACHE_BYTES
        self.free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def time_s(self, run: Callable[[], object]) -> Seconds:
        """By the performance counter."""
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun


def find_device(name: str) -> TorchDevice:
    """
    The device called *name*: `cpu`, `cuda`, or `cuda:1` and so on.

    Raises:
        SettingsError: There is none of that name.
    """
    if name == "cpu":
        return CpuDevice()
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdecimal() or name == kind):
        raise SettingsError(f"--device: {name!r} is none of cpu, cuda, cuda:N")
    if not torch.cuda.is_available():
        raise SettingsError(
            f"--device: torch {torch.__version__} finds no CUDA device here; run this where one "
            "is, with a torch built for CUDA, or --device cpu for a try"
        )
    if int(number or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f"--device: there is no {name}, but cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    return CudaDevice(torch.device("cuda", int(number or 0)))
