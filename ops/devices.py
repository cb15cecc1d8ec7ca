"""The NVIDIA GPUs of this machine, without importing torch."""

import shutil
import subprocess
from typing import NamedTuple

_QUERY = "name,driver_version,memory.total"


class Gpu(NamedTuple):
    """One GPU, as `nvidia-smi` describes it."""

    name: str
    driver: str
    memory: str
    """With its unit: `81559 MiB`."""


def gpus() -> tuple[Gpu, ...]:
    """GPUs that `nvidia-smi` lists; none if the program is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    listed = subprocess.run(
        [program, f"--query-gpu={_QUERY}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        return ()
    rows = (line.split(", ") for line in listed.stdout.splitlines() if line)
    return tuple(Gpu(*row) for row in rows if len(row) == len(Gpu._fields))
