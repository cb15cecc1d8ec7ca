"""Memory of the host."""

from pathlib import Path

from shared.contracts.errors import SettingsError

_HOST = Path("/proc/meminfo")
_LIMIT, _USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def available_host_bytes(*, instead: str) -> int:
    """
    Host memory that is available to this process, within the limit of its container.

    Args:
        instead: What the user can set where it cannot be read.

    Raises:
        SettingsError: It cannot be read on this system.
    """
    try:
        text = _HOST.read_text()
    except OSError as error:
        raise SettingsError(f"the host's memory cannot be read: {error}; {instead}") from error
    sizes = {line.split(":")[0]: line.split()[1] for line in text.splitlines()}
    available = int(sizes["MemAvailable"]) << 10
    if _LIMIT.is_file() and (limit := _LIMIT.read_text().strip()) != "max":
        available = min(available, max(0, int(limit) - int(_USED.read_text())))
    return available
