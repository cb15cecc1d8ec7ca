"""Life cycle of one engine host, controlled by the agent's front."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import structlog

from services.agent.backends.settings import VllmSettings
from services.agent.backends.vllm.front.process import NO_VARIABLES, HostProcess
from services.agent.backends.vllm.front.start_turn import StartTurn
from services.agent.backends.vllm.shared.wire import (
    Activate,
    Attach,
    ClearCaches,
    Connection,
    HostCommand,
    HostEvent,
    HostReady,
    Reply,
    Shutdown,
    Warm,
)
from shared.contracts.base import Seconds
from shared.contracts.errors import EngineError

log = structlog.get_logger()


class HostLink:
    """
    A host process from its start to its end. Create it with `launch`.

    Args:
        process: The host.
        connection: Connection to the host.
        settings: Timeouts.
        turn: Turn of its start, which ends when it is ready or has ended.
        on_event: Receives the host's events, except replies and the event that the host is ready.
        on_lost: Called once when the host and its engines have ended, unless `close` ended them.
    """

    def __init__(
        self,
        process: HostProcess,
        connection: Connection[HostEvent],
        settings: VllmSettings,
        turn: StartTurn,
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
        self._replies: dict[str, asyncio.Future[Reply]] = {}
        """Name in a reply -> its future."""
        self._ready: asyncio.Future[HostReady] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda _ready: turn.end())
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
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> "HostLink":
        """
        Start a host in its turn, with further environment *variables*; `ready` waits for it.

        Raises:
            EngineError: The host cannot be started.
        """
        turn = await StartTurn.taken()
        ours, theirs = socket.socketpair()
        try:
            process = await HostProcess.launch(
                settings,
                connection=theirs,
                architectures=architectures,
                scratch=scratch,
                variables=variables,
            )
        except BaseException as error:
            ours.close()
            turn.end()
            if not isinstance(error, OSError):
                raise
            raise EngineError(f"cannot start the engine host: {error}") from error
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        connection: Connection[HostEvent] = Connection(reader, writer, HostEvent)
        return cls(process, connection, settings, turn, on_event=on_event, on_lost=on_lost)

    @property
    def pid(self) -> int:
        """Process id of the host; its engines are in the process group of the same id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """True once the host and its engines have ended."""
        return self._attendance.done()

    async def ready(self) -> HostReady:
        """
        Wait until the host has imported vLLM, and return its description.

        Raises:
            EngineError: The host ended, takes too long, or has no device for the settings.
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
        """Send *command* to the host, without waiting for a reply."""
        self._connection.send(command)

    async def ask(
        self, command: Activate | Warm | ClearCaches | Attach, timeout_s: Seconds
    ) -> Reply:
        """
        Send *command* and wait for its reply. At most one command per model may wait for its reply.

        Raises:
            EngineError: The command failed, or the host ended (`engine_dead`).
            TimeoutError: The host did not reply in time.
        """
        name = _name_in_reply(command)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[name] = reply
        self.send(command)
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        finally:
            del self._replies[name]

    def kill(self) -> None:
        """Kill the host and its engines; then `on_lost` is called."""
        self._process.kill()

    async def close(self) -> None:
        """End the host and its engines; kill them if they have not ended after a timeout."""
        self._closing = True
        self._lose_replies("the engine was closed")
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
                match event:
                    case HostReady():
                        self._ready.set_result(event)
                    case Reply():
                        self._on_reply(event)
                    case _:
                        self._on_event(event)
        except Exception:  # a bug ends the link; otherwise its runs would wait forever
            log.exception("message.rejected", sender="engine host")
        finally:
            self._connection.close()
            status = await self._ended()
        if not self._ready.done():
            self._ready.set_exception(
                EngineError(f"the engine host ended with status {status} before it was ready")
            )
            # Retrieve the exception, since asyncio would log a warning if `ready` was never called.
            self._ready.exception()
        if not self._closing:
            message = f"the engine host ended with status {status}"
            self._lose_replies(message)
            self._on_lost(message)

    def _on_reply(self, event: Reply) -> None:
        future = self._replies.get(event.model)
        if future is None or future.done():
            return
        if event.error:
            future.set_exception(EngineError(event.error))
        else:
            future.set_result(event)

    def _lose_replies(self, message: str) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineError(message, engine_dead=True))

    async def _ended(self) -> int:
        """Wait for the host's exit, kill its process group, and return the exit status."""
        if self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.close_timeout_s):
                    await self._process.wait()
                    await self._process.emptied()
        self._process.kill()
        return await self._process.wait()


def _name_in_reply(command: Activate | Warm | ClearCaches | Attach) -> str:
    """The command's model or server, which its reply repeats; empty for `ClearCaches`."""
    match command:
        case ClearCaches():
            return ""
        case Attach():
            return command.remote.url
        case _:
            return command.model


def _unsuitable(settings: VllmSettings, *, is_cpu: bool) -> str | None:
    """Return why the device cannot do what the settings require; None if it can."""
    if settings.host_kv_bytes and not is_cpu:
        return (
            "engine.vllm.host_kv_bytes requires a CPU: on a GPU set `kv_offloading_size` in "
            "the model's engine_args, for vLLM's own offloader"
        )
    return None
