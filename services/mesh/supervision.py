"""Starts services of a mesh again that end."""

import asyncio
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from services.mesh.mesh import AGENT, Ended, Mesh, error_of, is_agent
from shared.broker import topology
from shared.broker.listening import listening
from shared.contracts.base import Decoder, Seconds
from shared.contracts.telemetry import InstanceStatus
from shared.runtime.lifecycle import EXIT_NO_BROKER, EXIT_USAGE
from shared.runtime.tasks import pause

_decode: Decoder[InstanceStatus] = Decoder(InstanceStatus)
LOOK_S: Seconds = 0.25
MOST_RESTARTS, WINDOW_S = 5, 60.0
"""A service that ends more often than this within the window ends the mesh."""
FIRST_DELAY_S: Seconds = 0.5
"""Delay before a second restart within the window; doubled for each further one."""

BROKER_DELAY_S: Seconds = 2.0
"""Delay before a service starts again that found no broker."""


class Restarts:
    """
    Delays between restarts of one service.

    Args:
        now: Monotonic time.
    """

    def __init__(self, now: Callable[[], Seconds] = time.monotonic) -> None:
        self._now = now
        self._begun: deque[Seconds] = deque()

    def next_delay_s(self) -> Seconds | None:
        """Count a restart, and return how long to wait before it; None if there were too many."""
        now = self._now()
        while self._begun and now - self._begun[0] > WINDOW_S:
            self._begun.popleft()
        number = len(self._begun)
        if number >= MOST_RESTARTS:
            return None
        self._begun.append(now)
        return FIRST_DELAY_S * 2 ** (number - 1) if number else 0.0


@dataclass(slots=True)
class _Restart:
    """One restart, until it is reported."""

    cause: str
    begun_at: Seconds
    num_held: int = 0
    """Number of requests that an agent had, by its last status."""
    incarnation: str = ""
    """Incarnation of the agent that has ended."""


class Supervisor:
    """
    Starts the services of *mesh* again that end, and reports what has ended and why.

    Args:
        mesh: A mesh that is ready.
        say: Prints one line.
        now: Monotonic time.
    """

    def __init__(
        self, mesh: Mesh, say: Callable[[str], None], now: Callable[[], Seconds] = time.monotonic
    ) -> None:
        self._mesh = mesh
        self._say = say
        self._now = now
        self._restarts: dict[str, Restarts] = defaultdict(lambda: Restarts(now))
        self._statuses: dict[str, InstanceStatus] = {}
        self._awaited: dict[str, _Restart] = {}
        """Name of an agent's process -> its restart; until the agent reports."""
        self._without_broker: dict[str, Seconds] = {}
        """Name of a service -> time at which it last found no broker."""

    async def run(self, stop: asyncio.Event) -> None:
        """
        Supervise until *stop*.

        Raises:
            SettingsError: A service ends because of its settings.
            MeshError: A service ends too often.
        """
        bindings = [(topology.TELEMETRY, topology.STATUS_KEYS)]
        queue = topology.temporary_queue("supervision")
        async with (
            self._mesh.open_broker("headway-supervision") as broker,
            listening(broker, queue, _decode, bindings, self._on_status),
        ):
            while not stop.is_set():
                for ended in self._mesh.ended():
                    await self._restart(ended, stop)
                await pause(stop, LOOK_S)

    async def _restart(self, ended: Ended, stop: asyncio.Event) -> None:
        if ended.code == EXIT_NO_BROKER:
            await self._restart_without_broker(ended.name, stop)
            return
        delay_s = self._restarts[ended.name].next_delay_s()
        if ended.code == EXIT_USAGE or delay_s is None:
            often = "" if delay_s is not None else f" more than {MOST_RESTARTS} times in a minute"
            raise error_of(ended)(f"{ended.name} {cause_of(ended)}{often}{ended.last_words}")
        error = ended.last_words if ended.code is None else ""
        restart = _Restart(cause_of(ended) + error, self._now())
        status = self._statuses.get(_instance_of(ended.name))
        if status is not None:
            restart.num_held = status.running + status.waiting
            restart.incarnation = status.incarnation
        await pause(stop, delay_s)
        if stop.is_set():
            return
        await self._mesh.restart(ended.name)
        if is_agent(ended.name) and restart.incarnation:
            self._awaited[ended.name] = restart
        else:
            self._say(f"{ended.name} {restart.cause}; started again")

    async def _restart_without_broker(self, name: str, stop: asyncio.Event) -> None:
        """
        Start a service again that found no broker. The service is not at fault, so that this does
        not count: it is repeated until a broker answers.
        """
        now = self._now()
        if now - self._without_broker.get(name, -inf) > WINDOW_S:
            self._say(f"{name} finds no broker; it is started again until one answers")
        self._without_broker[name] = now
        if not await pause(stop, BROKER_DELAY_S):
            await self._mesh.restart(name)

    def _on_status(self, status: InstanceStatus) -> None:
        name = f"{AGENT}{status.instance_id}"
        restart = self._awaited.get(name)
        if restart is not None and restart.incarnation != status.incarnation:
            del self._awaited[name]
            self._say(_line(name, restart, self._now() - restart.begun_at))
        self._statuses[status.instance_id] = status


def cause_of(ended: Ended) -> str:
    """How a service has ended, in words."""
    code = ended.code
    if code is not None and code < 0:
        try:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        except ValueError:
            return f"was killed by signal {-code}"
    return "ended" if code is None else f"ended with code {code}"


def _line(name: str, restart: _Restart, duration_s: Seconds) -> str:
    requests = "request continues" if restart.num_held == 1 else "requests continue"
    held = f"; its {restart.num_held} {requests}" if restart.num_held else ""
    return f"{_instance_of(name)} {restart.cause}; back after {duration_s:.1f} s{held}"


def _instance_of(process: str) -> str:
    return process.removeprefix(AGENT)
