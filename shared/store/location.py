"""Where the store lies: its database and file bodies, and the hosts that may use them."""

import os
import re
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from shared.contracts.errors import SettingsError
from shared.store.settings import StoreSettings

PRIVATE = 0o700
"""Mode of directories that the store makes: only the services' user enters them."""
SQLITE, POSTGRESQL = "sqlite+aiosqlite", "postgresql+asyncpg"
DRIVERS = {
    "sqlite": SQLITE,
    SQLITE: SQLITE,
    "postgres": POSTGRESQL,
    "postgresql": POSTGRESQL,
    POSTGRESQL: POSTGRESQL,
}
"""Scheme of a URL -> the driver that the store uses."""
NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.cephfs", "fuse.gcsfuse"),
        *("fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs"),
        *("lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs", "virtiofs"),
    }
)
"""Types of file systems that several hosts may share: the locks of SQLite are not safe on them."""
MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")
"""A space or another special character in a mount point."""


@dataclass(frozen=True, slots=True)
class Location:
    """Database and file bodies of one store."""

    url: URL
    """URL of the database, with its driver."""
    files: str
    """fsspec URL of the folder of file bodies."""
    sqlite_file: Path | None
    """The database file; None for PostgreSQL."""

    @property
    def shown(self) -> str:
        """The database without a password, for messages."""
        return self.url.render_as_string(hide_password=True)


def location_of(settings: StoreSettings) -> Location | None:
    """
    The store's location; None without a store.

    Raises:
        SettingsError: The database is not supported or lies on a network file system, the place of
            file bodies is missing, or two settings contradict each other.
    """
    if settings.data_dir is None and settings.url is None:
        if settings.files is not None:
            raise SettingsError("store.files needs store.url or store.data_dir")
        return None
    if settings.orphan_grace_s < 2 * settings.upload_timeout_s:
        raise SettingsError(
            f"store.orphan_grace_s is {settings.orphan_grace_s:g}; it must be at least twice "
            f"store.upload_timeout_s ({settings.upload_timeout_s:g})"
        )
    data_dir = None if settings.data_dir is None else Path(settings.data_dir).absolute()
    url = URL.create(SQLITE, database=str(data_dir and data_dir / "store.db"))
    if settings.url is not None:
        url = database_url(settings.url)
    if settings.files is None and data_dir is None:
        raise SettingsError(
            "store.files or store.data_dir must be set with store.url: the place of file bodies"
        )
    files = settings.files or f"file://{data_dir}/files"
    try:
        urlsplit(files)
    except ValueError as error:
        raise SettingsError(f"store.files is not a URL: {error}") from error
    if url.drivername != SQLITE:
        return Location(url, files, None)
    file = Path(url.database or "").absolute()
    if url.database in (None, "", ":memory:"):
        raise SettingsError("store.url names no file: use sqlite:///path/to/store.db")
    refuse_network_file_system(file)
    return Location(url.set(database=str(file)), files, file)


def database_url(text: str) -> URL:
    """
    The URL of a database with the driver that the store uses.

    Raises:
        SettingsError: It is not a URL of SQLite or PostgreSQL; the message has no password.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # the second: a port that is not a number
        raise SettingsError(
            "store.url is not a URL of a database: use postgresql://user:password@host/name or "
            "sqlite:///path/to/store.db"
        ) from None
    driver = DRIVERS.get(url.drivername)
    if driver is None:
        raise SettingsError(
            f"store.url has the scheme {url.drivername!r}; supported are postgresql and sqlite"
        )
    return url.set(drivername=driver)


def refuse_network_file_system(file: Path, mounts: str | None = None) -> None:
    """
    Check that SQLite may keep *file* where it is.

    Args:
        file: Absolute path; neither it nor its directory need to exist.
        mounts: Content of `/proc/self/mountinfo`; default: that of this process. Without it, as on
            other systems than Linux, nothing is checked.

    Raises:
        SettingsError: The file is on a network file system.
    """
    if mounts is None:
        mounts = MOUNTS.read_text() if MOUNTS.exists() else ""
    kind = file_system_of(file.resolve(), mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise SettingsError(
            f"store: {file} is on a file system of type {kind}, where several hosts could open it; "
            "SQLite serves one host. Use a local directory, or PostgreSQL: "
            "store.url=postgresql://user:password@host/name"
        )


def file_system_of(path: Path, mounts: str) -> str | None:
    """Type of the file system with *path* according to the lines *mounts*; None if unknown."""
    found: tuple[int, str] | None = None
    for line in mounts.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if not separator or len(fields) < 5:  # noqa: PLR2004 - the mount point is the fifth field
            continue
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # If several file systems are mounted at a point, the last one is visible.
        if path.is_relative_to(point) and (found is None or len(point.parts) >= found[0]):
            found = len(point.parts), right.split()[0]
    return None if found is None else found[1]


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of the host of a process; equal for all containers of one kernel."""

    boot: str
    """Changes when the host starts."""
    machine: str
    """Stays the same; empty if the system has none."""
    name: str

    def is_same(self, other: "Host") -> bool:
        """True if both are one host, also after the host was started again."""
        if self.boot == other.boot:
            return True
        return bool(self.machine) and (self.machine, self.name) == (other.machine, other.name)


def this_host() -> Host:
    """Identity of the host that runs this process."""
    boot = _text(Path("/proc/sys/kernel/random/boot_id")) or f"node-{uuid.getnode():x}"
    return Host(boot=boot, machine=_text(Path("/etc/machine-id")), name=socket.gethostname())


def this_process() -> str:
    """A name for this process that no other process has, for leases."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
