"""Life cycle of a mesh: start, wait until ready, stop."""

import asyncio
import contextlib
import signal
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from services.mesh.ready import Say, silent, wait_ready
from services.mesh.spec import MeshSpec
from shared.broker.protocol import Broker
from shared.contracts.errors import MeshError, SettingsError
from shared.runtime.lifecycle import EXIT_USAGE

READY_TIMEOUT_S = 240.0
AGENT, GATEWAY = "agent-", "gateway"
"""First part of the names of agents' processes; the id of the instance follows."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A service that has ended although the mesh runs."""

    name: str
    code: int | None
    """Exit code of its process; below 0: the signal that killed it. None: it was no process."""
    last_words: str
    """Its error, or the end of its log, as a clause after what has happened."""


class Mesh(ABC):
    """
    Runs the services of a `MeshSpec` while its context is open.

    Args:
        spec: The services.
        ready_timeout_s: Time limit of the start.
        say: Prints one line about what is missing while the mesh starts.

    Raises on entry:
        MeshError: A service ended before the mesh was ready, or the mesh was not ready in time.
    """

    def __init__(
        self, spec: MeshSpec, *, ready_timeout_s: float = READY_TIMEOUT_S, say: Say = silent
    ) -> None:
        self.spec = spec
        self._ready_timeout_s = ready_timeout_s
        self._say = say

    @abstractmethod
    async def start(self) -> None:
        """Start every service of the mesh."""

    @abstractmethod
    def ended(self) -> list[Ended]:
        """The started services that have ended."""

    def check(self) -> None:
        """
        Check that no started service has ended.

        Raises:
            SettingsError: A service has ended because of its settings.
            MeshError: A service has ended; the message contains the reason.
        """
        for each in self.ended():
            raise error_of(each)(f"{each.name} ended{each.last_words}")

    @abstractmethod
    async def retry_starts(self) -> None:
        """Restart the services that ended because the broker did not answer in time."""

    async def _check_start(self) -> None:
        await self.retry_starts()
        self.check()

    @abstractmethod
    async def kill(self, name: str) -> None:
        """End one service of the mesh immediately, without a drain."""

    @abstractmethod
    async def restart(self, name: str) -> None:
        """Restart a killed service of the mesh with the same settings."""

    @abstractmethod
    async def stop_services(self, *, serving: bool) -> None:
        """Stop the services that serve requests, as `serves` has it, or all others."""

    @abstractmethod
    def open_broker(self, client_name: str) -> AbstractAsyncContextManager[Broker]:
        """Open a client of the mesh's broker under the name *client_name*."""

    async def stop(self) -> None:
        """
        Stop agents and gateways first, then the other services.

        Groupers must still run to receive the requests that agents requeue. Gateways take no new
        requests from the begin of the stop, and pass on what agents still answer.
        """
        await self.stop_services(serving=True)
        await self.stop_services(serving=False)

    async def __aenter__(self) -> Self:
        try:
            async with self.open_broker("headway-mesh") as broker:
                await self.start()
                await wait_ready(
                    broker,
                    self.spec,
                    timeout_s=self._ready_timeout_s,
                    check=self._check_start,
                    say=self._say,
                )
        except BaseException:  # cancelled or failed: stop everything that was started
            await self._stop_after_failure()
            raise
        return self

    async def _stop_after_failure(self) -> None:
        """Stop, also if Ctrl-C comes meanwhile: the services would stay without the mesh."""
        stopping = asyncio.create_task(self.stop(), name="stop-mesh")
        while not stopping.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(stopping)
        await stopping

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()


def error_of(ended: Ended) -> type[MeshError]:
    """Kind of the error that *ended* is for the user of the mesh."""
    return SettingsError if ended.code == EXIT_USAGE else MeshError


def stop_signals() -> list[signal.Signals]:
    """
    Signals that end the process of a mesh, which then stops the services. SIGHUP comes when a
    terminal is closed: the services have sessions of their own, and would stay. `nohup` ignores it.
    """
    ends = [signal.SIGINT, signal.SIGTERM]
    return ends if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*ends, signal.SIGHUP]


def serves(name: str) -> bool:
    """True if *name* is the name of an agent's or a gateway's process in a spec."""
    return is_agent(name) or name.startswith(GATEWAY)


def is_agent(name: str) -> bool:
    """True if *name* is the name of an agent's process in a spec."""
    return name.startswith(AGENT)
