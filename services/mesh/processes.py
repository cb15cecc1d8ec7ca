"""A mesh of separate processes on this machine."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog

from services.mesh.ready import wait_ready
from services.mesh.spec import MeshSpec
from shared.broker.connect import open_broker
from shared.broker.protocol import Broker
from shared.contracts.errors import MeshError

log = structlog.get_logger()
STOP_TIMEOUT_S = 40.0


class MeshProcess:
    """
    One service process, with its settings file and log.

    Args:
        name: Unique in the mesh; names the files.
        service: Which service it runs.
        settings: Its settings.
        directory: Where settings and log go.
    """

    def __init__(
        self, name: str, *, service: str, settings: dict[str, Any], directory: Path
    ) -> None:
        self.name = name
        self._service = service
        self._settings_file = directory / f"{name}.json"
        self.log_file = directory / f"{name}.log"
        # Before the broker's password is in it.
        self._settings_file.touch(mode=0o600)
        self._settings_file.chmod(0o600)
        self._settings_file.write_bytes(msgspec.json.encode(settings))
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id; the process must have been started."""
        assert self._process is not None  # noqa: S101 - the caller's duty
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it, or start it again."""
        with self.log_file.open("ab") as log_stream:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"services.{self._service}",
                "run",
                "--config",
                str(self._settings_file),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_stream,
                stderr=log_stream,
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        if self.running:
            os.kill(self.pid, number)

    async def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """
        Wait for its end; its exit code.

        Raises:
            TimeoutError: It goes on.
        """
        assert self._process is not None  # noqa: S101 - the caller's duty
        return await asyncio.wait_for(self._process.wait(), timeout_s)

    async def stop(self) -> None:
        """Ask it to drain and end; kill its process group if it does not."""
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
        """The end of its log."""
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-count:])


class ProcessMesh:
    """
    Runs a `MeshSpec` as processes while the context is open.

    Raises on entry:
        MeshError: A process ended before the mesh was ready; carries the end of its log.
    """

    def __init__(self, spec: MeshSpec, *, ready_timeout_s: float = 240.0) -> None:
        self.spec = spec
        self._ready_timeout_s = ready_timeout_s
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        self.processes = {
            name: MeshProcess(name, service=service, settings=settings, directory=spec.log_dir)
            for name, (service, settings) in spec.service_settings().items()
        }

    async def __aenter__(self) -> Self:
        try:
            async with self.open_broker("headway-mesh") as broker:
                await asyncio.gather(*(process.start() for process in self.processes.values()))
                await wait_ready(
                    broker, self.spec, timeout_s=self._ready_timeout_s, check=self.check
                )
        except (
            BaseException
        ):  # cancelled or failed: what was begun is undone, and it is raised again
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    def check(self) -> None:
        """
        Nothing that was started has ended.

        Raises:
            MeshError: Something has; says what and shows the end of its log.
        """
        for process in self.processes.values():
            if not process.running:
                raise MeshError(
                    f"{process.name} ended; the end of {process.log_file.name}:\n"
                    f"{process.last_lines()}"
                )

    async def stop(self) -> None:
        """Agents first, so that what they hand back finds groupers; then the rest."""
        agents = [p for name, p in self.processes.items() if name.startswith("agent-")]
        rest = [p for name, p in self.processes.items() if not name.startswith("agent-")]
        for group in (agents, rest):
            await asyncio.gather(*(process.stop() for process in group))

    @contextlib.asynccontextmanager
    async def open_broker(self, client_name: str) -> AsyncIterator[Broker]:
        """A client of the mesh's broker."""
        async with open_broker(self.spec.broker, client_name=client_name) as broker:
            yield broker
