"""Memory of the host."""

from pathlib import Path

_HOST = Path("/proc/meminfo")
_LIMIT, _USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def available_host_bytes() -> int:
    """
    Host memory that is available to this process, within the limit of its container.

    Raises:
        OSError: It cannot be read on this system.
    """
    sizes = {line.split(":")[0]: line.split()[1] for line in _HOST.read_text().splitlines()}
    available = int(sizes["MemAvailable"]) << 10
    if _LIMIT.is_file() and (limit := _LIMIT.read_text().strip()) != "max":
        available = min(available, max(0, int(limit) - int(_USED.read_text())))
    return available
