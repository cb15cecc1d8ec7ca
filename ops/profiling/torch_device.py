"""A device for plain torch: its memory, its caches, and its timer."""

import os
import time
from collections.abc import Callable
from typing import Protocol

import torch

from shared.contracts.base import Seconds
from shared.contracts.errors import SettingsError

_CPU_CACHE_BYTES = 64 << 20
"""Assumed size of a CPU's last-level cache; torch does not report it."""


class TorchDevice(Protocol):
    """Device on which the layers of a model shape are timed."""

    device: torch.device
    name: str
    """Name of the device as vLLM reports it in a profile."""
    cache_bytes: int
    """Size in bytes of the cache in which weights may remain between two uses."""
    free_bytes: int
    """Free memory of the device in bytes before any allocation by this process."""

    def time_s(self, run: Callable[[], object]) -> Seconds:
        """Time that the device takes for *run*; the device is idle at the start."""


class CudaDevice:
    """
    A GPU, timed by its own events.

    Args:
        device: An existing device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(torch.cuda.get_device_name(device))
        self.cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self.free_bytes = int(torch.cuda.mem_get_info(device)[0])

    def time_s(self, run: Callable[[], object]) -> Seconds:
        """Time from the first kernel of *run* to the last kernel, including waits for launches."""
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
    """The machine's CPU, for trials of the profiler."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "cpu"
        self.cache_bytes = _CPU_CACHE_BYTES
        self.free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def time_s(self, run: Callable[[], object]) -> Seconds:
        """Time of *run* on the CPU, measured by the performance counter."""
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun


def find_device(name: str) -> TorchDevice:
    """
    The device called *name*: `cpu`, `cuda`, `cuda:1` etc.

    Raises:
        SettingsError: There is no device of that name.
    """
    if name == "cpu":
        return CpuDevice()
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdecimal() or name == kind):
        raise SettingsError(f"--device: {name!r} must be one of cpu, cuda, cuda:N")
    if not torch.cuda.is_available():
        raise SettingsError(
            f"--device: torch {torch.__version__} finds no CUDA device; run this on a machine "
            "with one and a torch built for CUDA, or use --device cpu for a trial"
        )
    if int(number or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f"--device: {name} does not exist: use cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    return CudaDevice(torch.device("cuda", int(number or 0)))
