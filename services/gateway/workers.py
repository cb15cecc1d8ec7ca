"""Several processes of one gateway that share its port."""

import asyncio
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import structlog

from services.gateway.settings import Settings
from shared.contracts.errors import SettingsError
from shared.runtime.cli import Ports
from shared.runtime.health import check_port
from shared.runtime.lifecycle import EXIT_USAGE
from shared.runtime.tasks import every, pause

log = structlog.get_logger()
READINESS_PERIOD_S = 0.5
RESTART_AFTER_S = 1.0


async def serve_workers(ports: Ports[Settings], stop: asyncio.Event) -> None:
    """
    Run the workers until *stop*, and start each worker that ends before that again.

    Raises:
        SettingsError: The port is in use, or a worker cannot run with its settings.
    """
    settings = ports.settings
    check_port(settings.host, settings.port, shared=True)
    with TemporaryDirectory(prefix="headway-gateway-") as directory:
        workers = [
            _Worker(index, settings, Path(directory) / f"{index}.json")
            for index in range(settings.workers)
        ]

        async def check() -> None:
            absent = [str(worker.index) for worker in workers if not worker.running]
            reason = f"workers not running: {', '.join(absent)}" if absent else None
            ports.health.set("workers", reason)

        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.run(stop), name=f"worker-{worker.index}")
            ports.health.started()
            await every(READINESS_PERIOD_S, check, stop=stop)


class _Worker:
    """One process of the gateway."""

    def __init__(self, index: int, settings: Settings, settings_file: Path) -> None:
        self.index = index
        self.running = False
        self._settings_file = settings_file
        # Restrict access before the broker's password is written to the file.
        settings_file.touch(mode=0o600)
        settings_file.write_bytes(msgspec.json.encode(worker_settings(settings, index)))

    async def run(self, stop: asyncio.Event) -> None:
        """
        Run the process until *stop*.

        Raises:
            SettingsError: The process cannot run with its settings.
        """
        # The environment's settings are in the file, with the worker's own values.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADWAY_")}
        while not stop.is_set():
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "services.gateway", "run", "--config", str(self._settings_file)),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process alone, which stops the worker
            )
            self.running = True
            code = await _ended(process, stop)
            self.running = False
            if code == EXIT_USAGE:
                raise SettingsError(f"worker {self.index} cannot run; see its error above")
            if not stop.is_set():
                log.warning("worker.ended", worker=self.index, code=code)
                await pause(stop, RESTART_AFTER_S)


def worker_settings(settings: Settings, index: int) -> Settings:
    """Settings of one worker; its health port, if any, follows the ports of those before it."""
    return msgspec.structs.replace(
        settings,
        workers=1,
        share_port=True,
        health_port=settings.health_port and settings.health_port + 1 + index,
    )


async def _ended(process: asyncio.subprocess.Process, stop: asyncio.Event) -> int:
    """Wait for the end of *process*, which *stop* brings about; return its exit code."""
    ended = asyncio.create_task(process.wait(), name="end of a worker")
    stopped = asyncio.create_task(stop.wait(), name="stop of workers")
    try:
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if process.returncode is None:
            process.terminate()
    return await ended
