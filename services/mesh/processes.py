"""A mesh of separate processes on this machine."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import structlog

from services.mesh.mesh import READY_TIMEOUT_S, Ended, Mesh, serves
from services.mesh.ready import Say, silent
from services.mesh.spec import MeshSpec
from shared.broker.connect import open_broker
from shared.broker.protocol import Broker
from shared.runtime.lifecycle import EXIT_NO_BROKER

log = structlog.get_logger()
STOP_TIMEOUT_S = 40.0
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class MeshProcess:
    """
    One service process, with its settings file and log.

    Args:
        name: Name of the process, unique in the mesh; used in file names.
        directory: Directory of the settings file and the log.
        environment: Variables besides those of this process.
    """

    def __init__(
        self,
        name: str,
        *,
        service: str,
        settings: dict[str, Any],
        directory: Path,
        environment: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        self.name = name
        self._service = service
        self._environment = environment
        self._settings_file = directory / f"{name}.json"
        self.log_file = directory / f"{name}.log"
        # Restrict access before the broker's password is written to the file.
        self._settings_file.touch(mode=0o600)
        self._settings_file.chmod(0o600)
        self._settings_file.write_bytes(msgspec.json.encode(settings))
        self.log_file.write_bytes(b"")  # the log of an earlier mesh is of no use here
        self.code: Path | None = None
        """Folder with the packages that the process runs; None: those of this process."""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id of the service; the process must have been started."""
        assert self._process is not None  # noqa: S101 - the caller's duty
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the ended process; None if it runs or was not started."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start or restart the process of the service."""
        with self.log_file.open("ab") as log_stream:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"services.{self._service}",
                "run",
                "--config",
                str(self._settings_file),
                cwd=self.code,
                env=os.environ | self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_stream,
                stderr=log_stream,
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process of the service only, not to its process group."""
        if self.running:
            os.kill(self.pid, number)

    async def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """
        Wait until the process of the service has ended; return its exit code.

        Raises:
            TimeoutError: The process has not ended in time.
        """
        assert self._process is not None  # noqa: S101 - the caller's duty
        return await asyncio.wait_for(self._process.wait(), timeout_s)

    async def stop(self) -> None:
        """Send the process the signal to drain and end; kill its process group after a timeout."""
        if not self.running:
            return
        self.signal(signal.SIGTERM)
        try:
            await self.wait()
        except TimeoutError:
            log.warning("process.killed", name=self.name)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            await self.wait()

    def last_lines(self, count: int = 12) -> str:
        """Last lines of the log of the service process."""
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-count:])


class ProcessMesh(Mesh):
    """
    Runs the services as processes.

    If a process ends, the error contains the end of its log.
    """

    def __init__(
        self, spec: MeshSpec, *, ready_timeout_s: float = READY_TIMEOUT_S, say: Say = silent
    ) -> None:
        super().__init__(spec, ready_timeout_s=ready_timeout_s, say=say)
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        environments = spec.environments()
        self.processes = {
            name: MeshProcess(
                name,
                service=service,
                settings=settings,
                directory=spec.log_dir,
                environment=environments.get(name, NO_VARIABLES),
            )
            for name, (service, settings) in spec.service_settings().items()
        }

    async def start(self) -> None:
        await asyncio.gather(*(process.start() for process in self.processes.values()))

    def ended(self) -> list[Ended]:
        return [
            Ended(
                process.name,
                process.exit_code,
                f"; the end of {process.log_file.name}:\n{process.last_lines()}",
            )
            for process in self.processes.values()
            if not process.running
        ]

    async def retry_starts(self) -> None:
        for process in self.processes.values():
            if process.exit_code == EXIT_NO_BROKER:
                log.warning("process.restarted", name=process.name, reason="no broker")
                await process.start()

    async def kill(self, name: str) -> None:
        """Kill one process with SIGKILL, as the kernel's OOM killer does."""
        self.processes[name].signal(signal.SIGKILL)
        await self.processes[name].wait()

    async def restart(self, name: str) -> None:
        await self.processes[name].start()

    async def stop_services(self, *, serving: bool) -> None:
        group = [p for name, p in self.processes.items() if serves(name) is serving]
        await asyncio.gather(*(process.stop() for process in group))

    def open_broker(self, client_name: str) -> AbstractAsyncContextManager[Broker]:
        return open_broker(self.spec.broker, client_name=client_name)
