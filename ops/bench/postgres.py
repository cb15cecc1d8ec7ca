"""A private PostgreSQL server for tests and benchmarks."""

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ops.ports import free_port
from shared.contracts.errors import SettingsError

USER = "headway"
START_TIMEOUT_S = 60.0
MEMORY, LEAST_FREE_BYTES = Path("/dev/shm"), 4 * 2**30
UNPRIVILEGED = "postgres"
"""User that runs the server if this process is root, which PostgreSQL refuses."""


def binary(name: str) -> str:
    """
    Path of a program of PostgreSQL, which Debian keeps outside of the search path.

    Raises:
        SettingsError: PostgreSQL is not installed.
    """
    found = shutil.which(name)
    if found is None:
        versions = Path("/usr/lib/postgresql").glob(f"*/bin/{name}")
        newest = sorted(versions, key=lambda path: int(path.parts[-3]))
        if not newest:
            raise SettingsError(f"{name} is not installed; the package postgresql has it")
        found = str(newest[-1])
    return found


def _fast_directory() -> Path | None:
    """A file system in memory with enough room for the databases, if there is one."""
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= LEAST_FREE_BYTES:
        return MEMORY
    return None


class PrivatePostgres:
    """
    A server with its own data and port; every user gets a database of its own.

    Raises:
        SettingsError: PostgreSQL is not installed.
    """

    def __init__(self) -> None:
        self._programs = {name: binary(name) for name in ("initdb", "postgres", "pg_isready")}
        # Not below the directories of this process, which its user alone may enter.
        self._directory = Path(tempfile.mkdtemp(prefix="headway-postgres-", dir=_fast_directory()))
        self._prefix: list[str] = []
        if os.geteuid() == 0:
            user = pwd.getpwnam(UNPRIVILEGED)
            os.chown(self._directory, user.pw_uid, user.pw_gid)
            ids = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
            self._prefix = ["setpriv", *ids]
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._num_made = 0
        data = str(self._directory / "data")
        self._run("initdb", "-D", data, "-U", USER, "--auth=trust", "--no-sync", "-E", "UTF8")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            # After a kill, the server refuses to start until its last child has ended.
            if self._process is None or self._process.poll() is not None:
                self._process = self._spawn()
            if time.monotonic() > give_up_at:
                log = (self._directory / "log").read_text(errors="replace")
                raise SettingsError(f"PostgreSQL did not start:\n{log[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server; connections are closed."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """End the server and delete its data."""
        self._end(signal.SIGQUIT)  # without writing to the disk what is deleted next
        shutil.rmtree(self._directory, ignore_errors=True)

    def url(self, name: str, *, port: int | None = None) -> str:
        return f"postgresql://{USER}@127.0.0.1:{port or self.port}/{name}"

    def fresh(self, *, template: str | None = None) -> str:
        """Name of a new database, which is empty or a copy of *template*."""
        return asyncio.run(self.create(template=template))

    async def create(self, *, template: str | None = None) -> str:
        """As `fresh`, for tests in an event loop."""
        import asyncpg  # noqa: PLC0415 - a driver of the extra `postgresql` of services

        self._num_made += 1
        name = f"test_{self._num_made}"
        copied = "" if template is None else f" TEMPLATE {template}"
        connection = await asyncpg.connect(self.url("postgres"))
        try:
            await connection.execute(f"CREATE DATABASE {name}{copied}")
        finally:
            await connection.close()
        return name

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [self._programs["postgres"], "-D", str(self._directory / "data")]
        with (self._directory / "log").open("ab") as log:
            return subprocess.Popen(
                [
                    *self._prefix,
                    *command,
                    *("-p", str(self.port), "-h", "127.0.0.1", "-k", str(self._directory)),
                    # Processes are killed, not the machine.
                    *("-c", "fsync=off", "-c", "full_page_writes=off"),
                ],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _answers(self) -> bool:
        if self._process is None:
            return False
        command = [self._programs["pg_isready"], "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, check=False).returncode == 0

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        self._process.wait(timeout=60)
        self._process = None

    def _run(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [*self._prefix, self._programs[name], *arguments],
            cwd=self._directory,
            check=True,
            stdout=subprocess.DEVNULL,
        )


@contextlib.contextmanager
def running_postgres() -> Iterator[PrivatePostgres]:
    """
    Context with a running server.

    Raises:
        SettingsError: PostgreSQL is not installed, or does not start.
    """
    server = PrivatePostgres()
    try:
        server.start()
        yield server
    finally:
        server.close()
