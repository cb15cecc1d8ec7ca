"""The life of one engine host as the agent's front sees it."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.process import HostProcess
from services.agent.backends.vllm.wire import (
    Connection,
    HostCommand,
    HostEvent,
    HostReady,
    Shutdown,
)
from shared.contracts.errors import EngineError

log = structlog.get_logger()


class HostLink:
    """
    A host, from its launch to its end. Made by `launch`.

    Args:
        process: The host.
        connection: To it.
        settings: Timeouts.
        on_event: Gets what the host says, but not that it is ready.
        on_lost: Called once, when host and engines are gone, unless `close` ended them.
    """

    def __init__(
        self,
        process: HostProcess,
        connection: Connection[HostEvent],
        settings: VllmSettings,
        *,
        on_event: Callable[[HostEvent], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._process = process
        self._connection = connection
        self._settings = settings
        self._on_event = on_event
        self._on_lost = on_lost
        self._closing = False
        self._ready: asyncio.Future[HostReady] = asyncio.get_running_loop().create_future()
        self._attendance = asyncio.create_task(self._attend(), name="attend-engine-host")

    @classmethod
    async def launch(
        cls,
        settings: VllmSettings,
        *,
        architectures: Iterable[str],
        scratch: Path,
        on_event: Callable[[HostEvent], None],
        on_lost: Callable[[str], None],
    ) -> "HostLink":
        """
        Start a host; `ready` waits for it.

        Raises:
            EngineError: It cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await HostProcess.launch(
                settings, connection=theirs, architectures=architectures, scratch=scratch
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"cannot start the engine host: {error}") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        connection: Connection[HostEvent] = Connection(reader, writer, HostEvent)
        return cls(process, connection, settings, on_event=on_event, on_lost=on_lost)

    @property
    def pid(self) -> int:
        """Of the host; its engines are in the process group of the same id."""
        return self._process.pid

    async def ready(self) -> HostReady:
        """
        What the host is, once it has imported vLLM.

        Raises:
            EngineError: It ended, takes too long, or has no device for the settings.
        """
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                host = await asyncio.shield(self._ready)
        except TimeoutError:
            self.kill()
            raise EngineError(
                f"the engine host was not ready within {self._settings.start_timeout_s} s"
            ) from None
        reason = _unsuitable(self._settings, is_cpu=host.is_cpu)
        if reason is not None:
            self.kill()
            raise EngineError(reason)
        return host

    def send(self, command: HostCommand) -> None:
        """Tell the host to do something."""
        self._connection.send(command)

    def kill(self) -> None:
        """End the host and its engines at once; `on_lost` follows."""
        self._process.kill()

    async def close(self) -> None:
        """End the host and its engines, in order if it does so in time."""
        self._closing = True
        self.send(Shutdown())
        try:
            async with asyncio.timeout(self._settings.close_timeout_s):
                await asyncio.shield(self._attendance)
        except TimeoutError:
            log.warning("host.killed", timeout_s=self._settings.close_timeout_s)
            self.kill()
            await self._attendance

    async def _attend(self) -> None:
        try:
            async for event in self._connection.frames():
                if isinstance(event, HostReady):
                    self._ready.set_result(event)
                else:
                    self._on_event(event)
        except Exception:  # any bug ends the link: unheard, its runs would wait for ever
            log.exception("message.rejected", sender="engine host")
        finally:
            self._connection.close()
            status = await self._ended()
        if not self._ready.done():
            self._ready.set_exception(
                EngineError(f"the engine host ended with status {status} before it was ready")
            )
            # Read by `ready`; without this line asyncio warns when nobody called that.
            self._ready.exception()
        if not self._closing:
            self._on_lost(f"the engine host ended with status {status}")

    async def _ended(self) -> int:
        """The host's exit status; whatever is left of its group is killed then."""
        if self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.close_timeout_s):
                    await self._process.wait()
                    await self._process.emptied()
        self._process.kill()
        return await self._process.wait()


def _unsuitable(settings: VllmSettings, *, is_cpu: bool) -> str | None:
    """Why the device cannot do what the settings ask for; none if it can."""
    if is_cpu and settings.async_scheduling:
        return (
            "engine.vllm.async_scheduling is for GPUs: on a CPU vLLM always schedules synchronously"
        )
    if settings.host_kv_bytes and not is_cpu:
        return (
            "engine.vllm.host_kv_bytes is for CPUs: on a GPU set `kv_offloading_size` in the "
            "model's engine_args, for vLLM's own offloader"
        )
    return None
