"""Locks of devices, so that two agents of a machine never take the same one."""

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from services.agent.devices.found import Device
from shared.contracts.errors import SettingsError

_MODE = 0o666
"""Agents of different users lock the same files."""


def lock_directory() -> Path:
    """Directory of the lock files, which all agents of a machine share."""
    return Path(tempfile.gettempdir()) / "headway-devices"


@contextmanager
def taken(devices: Sequence[Device], holder: str, directory: Path) -> Iterator[None]:
    """
    Context in which this process has *devices*. The kernel frees them when the process ends,
    however it ends.

    Args:
        devices: Devices of this machine.
        holder: Name of the agent, for the message to others.
        directory: Directory of the lock files.

    Raises:
        SettingsError: Another agent has a device; the message names both.
    """
    with ExitStack() as stack:
        for device in devices:
            descriptor = _opened(directory / f"{device.uuid}.lock")
            stack.callback(os.close, descriptor)
            _lock(descriptor, device)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{holder} (process {os.getpid()})".encode(), 0)
        yield


def _lock(descriptor: int, device: Device) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another agent"
        raise SettingsError(
            f"{device.label} is taken by {holder}: stop it, or choose another device (setting "
            "`devices`)"
        ) from error


def _opened(file: Path) -> int:
    """Descriptor of a lock file, which is created for all users of the machine."""
    try:
        with suppress(FileExistsError):
            file.parent.mkdir()
            file.parent.chmod(0o1777)
        try:
            # Not with O_CREAT: Linux may refuse that for a file of another user in such a folder.
            return os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(file, flags, _MODE)
            os.fchmod(descriptor, _MODE)
            return descriptor
    except OSError as error:
        raise SettingsError(f"cannot open the lock of a device: {error}") from error
